"""Mixtures of experts (MoE): records and replays the experts to which each token is sent, and lets grouped products
follow autocast.

    decoder stack --routing=RoutingPass--> layer --> attention (takes the pass off) | router (asks it) | experts

The pass is an argument, like the segments of packed attention, and reaches the router inside the layer: so gradient
checkpointing, which runs the layer again, gets the same pass, with the experts of the first run.

In transformers a module `experts` has stacked matrices: it takes hidden states [T, D] and the router's choices and
weights [T, K], and computes one grouped product per matrix.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from proxima.core.segment import segment_index
from proxima.data import FieldError
from proxima.data.packed_batch import PackedBatch, indices_of
from proxima.model.architecture import TextConfig

#: model_type of transformers whose routers weigh the k largest of softmax(logits), divided by their sum or not
FAMILIES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
SMALL = 128  # experts that int8 counts, with -1 for a token whose experts are not known
IN_AUTOCAST = "grouped_mm_in_autocast"


def is_moe(config: Any) -> bool:
    """True if a config of transformers is of an MoE model, of one of the `FAMILIES`."""
    return TextConfig.of(config).family in FAMILIES


def require_moe(config: Any, field: str, value: object) -> None:
    """Raise FieldError for `field` if a config of transformers is of a model without experts, or with routers that are
    not supported here."""
    if not is_moe(config):
        kinds = ", ".join(FAMILIES)
        kind = TextConfig.of(config).family
        bound = f"needs a mixture of experts of the kinds {kinds}, and model.path is of kind {kind}"
        raise FieldError(field, value, bound, remedy="leave it out, or use such a model")


def connect_routers(backbone: nn.Module, *, compiled: bool = False) -> None:
    """Make the routers of a decoder stack consult the pass that it is called with, `routing=…`; without one nothing
    changes. Idempotent.

    Args:
        compiled: layers are compiled, and this is before their first pass: the pass is consulted between their graphs.
    """
    stack: Any = backbone
    layers = [layer for layer in stack.layers if hasattr(layer.mlp, "gate")]
    if hasattr(stack, "asks_routing") and (stack.asks_routing or not compiled):
        return

    for hook in vars(stack).get("routing_hooks", ()):
        hook.remove()
    stack.routing_hooks = []
    for number, layer in enumerate(layers):
        hand_over: Any = partial(_hand_over, layer.mlp.gate)
        ask: Any = partial(_ask, number)
        if compiled:
            hand_over = torch.compiler.disable(hand_over)
            ask = torch.compiler.disable(ask)
        layer.mlp.gate.routing = None
        stack.routing_hooks += [
            layer.self_attn.register_forward_pre_hook(hand_over, with_kwargs=True),
            layer.mlp.gate.register_forward_hook(ask),
        ]
    stack.asks_routing = compiled


def _hand_over(router: Any, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    router.routing = kwargs.pop("routing", None)
    return args, kwargs


def _ask(number: int, router: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
    routing = router.routing
    router.routing = None
    if routing is None:
        return None
    return output[0], *routing.route(number, router, *output)


class RoutingPass:
    """The routing of one forward pass.

        chosen_t = given_t, or where it is -1 the k largest of p_t        p_t = softmax(logits_t)
        weights_t = p_t[chosen_t], and where the model does so / their sum

    The gradient flows through p_t to the router in either case. Source: routing replay, arXiv 2510.11370, section 3.

    Args:
        given: [L, M, K] int8 or int16, of each token and each of the M MoE layers; None: the routers choose everywhere.
        keeps_logits: also record what `balance` reads.
        recomputed: the backward pass runs the layers again. Their products may then differ in the last bit, but the
            experts are those of the first time.
    """

    def __init__(self, given: Tensor | None = None, *, keeps_logits: bool = False, recomputed: bool = False) -> None:
        self.given = given
        self.keeps_logits = keeps_logits
        self.recomputed = recomputed
        self._chosen: dict[int, Tensor] = {}  # by MoE layer: [L, K]
        self._logits: dict[int, Tensor] = {}  # [L, E], with gradient
        self._differing: dict[int, Tensor] = {}  # [L], experts that the router would not have chosen

    def route(self, number: int, router: Any, logits: Tensor, weights: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts [L, K] of MoE layer `number`, in place of those that its router chose."""
        chosen = own
        if number in self._chosen:
            chosen = self._chosen[number].long()
        else:
            if self.given is not None:
                given = self.given[:, number].long()
                replayed = given[:, :1] >= 0
                chosen = torch.where(replayed, given, own)
                other = (given[:, :, None] != own[:, None, :]).all(-1) & replayed
                self._differing[number] = other.sum(1)
            self._chosen[number] = chosen.to(id_dtype(logits.shape[-1]))
            if self.keeps_logits:
                self._logits[number] = logits
        if self.given is not None or self.recomputed:
            picked = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
            if not hasattr(router, "norm_topk_prob") or router.norm_topk_prob:
                picked = picked / picked.sum(-1, keepdim=True)
            weights = picked.to(weights.dtype)
        return weights, chosen

    def outputs(self, batch: PackedBatch, needs: frozenset[str]) -> dict[str, Tensor]:
        """The outputs that the pass adds to `TokenOutputs`."""
        outputs = dict[str, Tensor]()
        if "expert_load" in needs:
            outputs |= self.balance(batch)
        if "routed_experts" in needs:
            outputs["routed_experts"] = self.chosen()
        if self.given is not None:
            outputs["route_counts"] = self.counts(batch)
        return outputs

    def chosen(self) -> Tensor:
        """[L, M, K] int8, or int16 for more than 128 experts: those that each token was sent to."""
        return torch.stack([self._chosen[number] for number in sorted(self._chosen)], 1)

    def counts(self, batch: PackedBatch) -> Tensor:
        """[2] float64, over the positions that predict response tokens: given experts that the routers would not have
        chosen, and all given experts."""
        assert self.given is not None
        replayed = (self.given.index_select(0, batch.predict) >= 0).sum(dtype=torch.float64)
        other = torch.stack([self._differing[number] for number in sorted(self._differing)], 1)
        return torch.stack([other.index_select(0, batch.predict).sum(dtype=torch.float64), replayed])

    def balance(self, batch: PackedBatch) -> dict[str, Tensor]:
        """[S, M, E] float32 of each sequence, over the positions that predict its response tokens: `expert_count`, how
        often each expert was chosen, and `expert_probability`, the mean of p_t, with gradient."""
        rows = segment_index(batch.cu_seqlens, sum(batch.tokens_of))
        part = getattr(batch, "rows", None)  # of a `BatchPart`
        if part is not None:
            rows = rows[part]
        counts = []
        probabilities = []
        for number in sorted(self._logits):
            logits = self._logits[number].index_select(0, batch.predict)
            chosen = self._chosen[number].index_select(0, batch.predict)
            p = logits.softmax(-1, dtype=torch.float32)
            zeros = p.new_zeros(len(batch.cu_seqlens) - 1, p.shape[1])
            probabilities.append(zeros.index_add(0, rows, p))
            flat = (rows[:, None] * p.shape[1] + chosen).flatten()
            counts.append(torch.bincount(flat, minlength=zeros.numel()).view_as(zeros).to(p.dtype))
        lengths = batch.cu_seqlens.diff().clamp(min=1)[:, None, None]
        return {"expert_count": torch.stack(counts, 1), "expert_probability": torch.stack(probabilities, 1) / lengths}


def id_dtype(experts: int) -> torch.dtype:
    """The smallest dtype that holds the expert ids and -1."""
    return torch.int8 if experts <= SMALL else torch.int16


def split_chosen(chosen: Tensor, batch: PackedBatch) -> dict[str, Tensor]:
    """Split the experts [L, M, K] of a batch's tokens into columns for its trajectories, one after the other."""
    prompts = indices_of(list(chain.from_iterable(batch.prompts))).to(chosen.device)
    return {"routed_experts": chosen[batch.predict], "prompt_routed_experts": chosen[prompts]}


def compute_in_autocast(model: nn.Module) -> None:
    """Make grouped products follow autocast, as linear layers do. Autocast does not cover them: with float32 weights
    they would be float32, for which a GPU has no kernel, so that it computes expert by expert."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IN_AUTOCAST, _grouped_in_autocast)
    for experts in stacked_experts(model):
        if experts.config._experts_implementation == "grouped_mm":
            experts.config._experts_implementation = IN_AUTOCAST


def stacked_experts(model: nn.Module) -> Iterator[Any]:
    """The modules of this interface, whose weights are all [experts, …]."""
    for module in model.modules():
        weights = list(module.parameters())
        if hasattr(module, "_apply_gate") and weights and all(len(p) == module.num_experts for p in weights):
            yield module


class OtherWeights:
    """A module as its forward method reads it, but with other weights and settings, and without hooks."""

    def __init__(self, module: Any, weights: Mapping[str, Tensor], **settings: Any) -> None:
        self.module = module
        self.weights = weights
        vars(self).update({**weights, **settings})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _grouped_in_autocast(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        replaced = isinstance(experts, OtherWeights)
        own = experts.weights if replaced else dict(experts.named_parameters(recurse=False))
        lowered = {name: weight.to(dtype) for name, weight in own.items()}
        experts = OtherWeights(experts, lowered)
    return grouped_mm_experts_forward(experts, hidden, top_k_index, top_k_weights)
