"""The base of all models over packed trajectories: attention that keeps sequences apart, autocast, hidden states."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from proxima.data import UserError, require
from proxima.data.packed_batch import PackedBatch, pack
from proxima.data.trajectory import Trajectory
from proxima.model.architecture import decoder_layers
from proxima.model.attention import ATTENTION, flash_path, head_sizes, hugging_face_name, require_flash3
from proxima.model.attention_cost import pair_cost
from proxima.model.compilation import check_compiles, compile_layers
from proxima.model.images.image_inputs import ImageReader
from proxima.model.moe import RoutingPass, compute_in_autocast, connect_routers, is_moe, stacked_experts
from proxima.model.parallel.context import ContextGroup
from proxima.model.parallel.sharding import is_sharded
from proxima.model.positions import fix_positions
from proxima.model.pretrained import LoadedModel
from proxima.model.proof import proof_of
from proxima.model.recompute import recompute_layers

ROUTES = frozenset({"routed_experts", "expert_load"})  # outputs that the routers of an MoE model give


@dataclass(frozen=True, kw_only=True)
class TokenOutputs:
    """The outputs of a forward pass for each response token; None for those that the model lacks or that were not
    requested.

    log_prob [N] float32, nats, at the batch's temperature; entropy [N] float32, nats. value [N] float32, reward units,
    of the state that predicts the token. top_k_log_prob [N, K] float32, nats, of the ids in the batch's `top_k`, with
    gradient only for `top_k_gradient`. bucket_log_prob [N, J] float32, nats, with gradient, of those in its
    `bucket_token`. log_sum_square [N] float32, log Σ_v π_v² at the position, without gradient. Of an MoE model:
    expert_count and expert_probability as in `RoutingPass.balance`, routed_experts [L, M, K] as in its `chosen`, and
    where the batch's are replayed route_counts [2] as in its `counts`.
    """

    log_prob: Tensor | None = None
    entropy: Tensor | None = None
    value: Tensor | None = None
    top_k_log_prob: Tensor | None = None
    bucket_log_prob: Tensor | None = None
    log_sum_square: Tensor | None = None
    expert_count: Tensor | None = None
    expert_probability: Tensor | None = None
    routed_experts: Tensor | None = None
    route_counts: Tensor | None = None

    def no_gradient(self) -> Tensor:
        """[] 0, whose backward pass gives every weight a gradient of 0."""
        sums = [tensor.sum() for tensor in vars(self).values() if tensor is not None and tensor.requires_grad]
        return 0 * torch.stack(sums).sum()

    def need(self, name: str) -> Tensor:
        """The output of this name.

        Raises:
            ValueError: the model did not give it.
        """
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            raise ValueError(f"TokenOutputs.{name} is missing: this model does not give it, or it was not in `needs`.")
        return tensor


class PassSettings(TypedDict, total=False):
    """The keyword arguments of `PackedModel`, which its subclasses pass on."""

    attention: str
    share_prompt: bool
    compute_dtype: torch.dtype
    gradient_checkpointing: bool
    compile: bool
    replays_routes: bool


class PackedModel:
    """A loaded model that runs packed batches; `Policy` and `ScalarModel` add their outputs from the hidden states.

    Args:
        loaded: model and tokenizer.
        attention: `auto`, or a key of `proxima.model.attention.ATTENTION`. `auto` is `padded` if the model's
            proof finds that packed sequences would mix, else `flash3` or `varlen` where one of them computes, on a GPU
            in 16 bits, else `packed`.
        share_prompt: run the prompt of neighbouring trajectories of a group once.
        compute_dtype: autocast dtype; float32 switches autocast off.
        gradient_checkpointing: recompute activations in the backward pass instead of keeping them.
        compile: compile each layer, see `compilation`; a model or layout that it is not for raises FieldError.
        replays_routes: send tokens to the `routed_experts` of their trajectories.
    """

    backbone: Any  # the decoder stack, set by the subclass

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        attention: str = "auto",
        share_prompt: bool = True,
        compute_dtype: torch.dtype = torch.float32,
        gradient_checkpointing: bool = False,
        compile: bool = False,
        replays_routes: bool = False,
    ) -> None:
        self.loaded = loaded
        self.model = loaded.model.eval()  # a policy whose log-probs depend on a draw has no ratio to itself
        self.longest = fix_positions(self.model, None, loaded.max_length)  # tokens; None: not limited
        proof = proof_of(self.model)
        sharding = loaded.sharding
        splits_tokens = sharding is not None and sharding.context_parallel > 1
        path = proof.attention(attention, recompute=gradient_checkpointing)
        if attention == "auto" and path == "packed" and loaded.images is None:
            path = flash_path(head_sizes(self.model), self.device, compute_dtype) or path
        require_flash3(attention, self.device)
        attention = path
        self.attention = attention
        self.share_prompt = share_prompt and attention != "padded"
        self.compute_dtype = compute_dtype
        self.replays_routes = replays_routes
        self.compiles = compile
        # a model without attention takes no name for it
        if attention != "padded" or self.model._supports_sdpa:
            reader = self.model
            if loaded.images is not None:  # the tower attends as it always does
                reader = self.model.get_decoder()
            reader.set_attn_implementation(hugging_face_name(attention, compiled=compile))
        self.images: Any = None  # an `ImageReader`, where prompts show images
        if loaded.images is not None:
            shown = attention == "packed"
            remedy = "set it to packed"
            require(shown, "model.attention", attention, "can't be shown images", remedy=remedy)
            self.images = ImageReader(self.model, loaded.images, trained=loaded.vision_lr_ratio > 0)
        self.reroutes = False  # layers are recomputed in the backward pass, and their routers would choose again
        if any(hasattr(module, "_apply_gate") for module in self.model.modules()):
            compute_in_autocast(self.model)
            self.reroutes = gradient_checkpointing and attention != "padded" and is_moe(self.model.config)
        if compile:
            parallel = 1 if sharding is None else sharding.tensor_parallel
            check_compiles(self.model.config, attention=attention, tensor_parallel=parallel)
            if is_moe(self.model.config):
                connect_routers(self.model.get_decoder(), compiled=True)
            apart: Iterable[nn.Module] = ()
            if sharding is not None and sharding.expert_parallel > 1:
                apart = stacked_experts(self.model)
            compile_layers(decoder_layers(self.model), apart)
        if gradient_checkpointing:
            recompute_layers(self.model)
        self.context: Any = None  # a `ContextGroup`, where ranks split the tokens of a batch between them
        if sharding is not None and splits_tokens:
            self.context = ContextGroup(sharding, self.device, attention)

    @property
    def device(self) -> torch.device:
        """The device on which it computes; offloaded weights are stored elsewhere."""
        return self.loaded.device or self.model.device

    @property
    def pair_cost(self) -> float:
        """The cost of one token's attention to one other, by which shares are dealt; see `attention_cost`."""
        return pair_cost(self.model.config)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every weight that an optimizer may train, tied ones once."""
        yield from self.model.named_parameters()

    def pack(self, trajectories: Sequence[Trajectory], *, replay: bool = True) -> PackedBatch:
        """The packed batch for this model, on its device; without `replay` its routers choose.

        Raises:
            UserError: a sequence is longer than those for which the factors of positions were fixed.
        """
        most = max(map(len, trajectories), default=0)
        if self.longest is not None and most > self.longest:
            raise UserError(
                f"a sequence has {most} tokens, and the model's position factors were fixed for {self.longest}",
                remedy="raise model.max_length (serve-training: --max-length)",
            )
        routes = replay and self.replays_routes
        return pack(trajectories, share_prompt=self.share_prompt, routes=routes).to(self.device)

    def autocast(self) -> AbstractContextManager[None]:
        """A context for bf16 matrix products on float32 weights, or a null context."""
        sharding = self.loaded.sharding
        weights = next(self.model.parameters()).dtype
        if self.compute_dtype == ((sharding and sharding.gathered_dtype) or weights):
            return nullcontext()
        # a cache would hold the rounded weights of every layer until the end of the pass, which sharding is to avoid
        return torch.autocast(self.device.type, dtype=self.compute_dtype, cache_enabled=sharding is None)

    def run(self, function: Callable[[PackedBatch], Any], batch: PackedBatch) -> Any:
        """Return `function(batch)`, which reads the model's weights; every forward pass is one call of this method, and
        calls do not nest. On many ranks it is collective: `function` sees whole weights, and the backward pass of its
        result, a tensor or a dict of tensors by response token, starts the sum of the gradients. Where ranks split the
        tokens of a batch, `function` gets this rank's part, and all ranks get the combined result of all parts."""
        model: Any = self.model
        if not is_sharded(model):
            return function(batch)
        try:
            run_all = function
            if self.context is not None:
                run_all = partial(self.context.run, function)
            return model.packed_pass(partial(run_all, batch))
        except BaseException:
            model.reset_iter_state()
            raise
        finally:
            if not torch.is_grad_enabled():  # no backward pass will free what this one has gathered
                for module in filter(is_sharded, model.modules()):
                    module.reshard()

    def sync_gradients(self, on: bool) -> None:
        """Set whether the next backward passes end with the sum of all ranks' gradients. Off for all but the last
        micro-batch of an update: until then each rank keeps a whole gradient, or with `splits_gradients` its part of
        the sum over the ranks that share a copy. No effect on a model that is not sharded."""
        if is_sharded(self.model):
            sharding = self.loaded.sharding
            for module in self.roots():
                module.set_requires_gradient_sync(on or (sharding is not None and sharding.splits_gradients))
                module.set_requires_all_reduce(on)

    def idle_pass(self, outputs: frozenset[str] = frozenset(), *, backward: bool) -> None:
        """Join the other ranks' forward pass with `outputs`, and their backward pass, on a rank without a sequence: it
        runs one token, whose gradients are 0. No effect on a model that is not sharded."""
        if is_sharded(self.model):
            with torch.set_grad_enabled(backward):
                dummy = self._dummy(outputs)
                if backward:
                    dummy.no_gradient().backward()

    def roots(self) -> list[Any]:
        """The modules that own all trained weights."""
        return [self.model]

    def hidden(self, batch: PackedBatch, routing: RoutingPass | None = None) -> Tensor:
        """[N, D] the states that predict the response tokens; to be called within `run`, under `autocast`."""
        images = None if self.images is None else self.images.of_batch(batch)
        compute = ATTENTION[self.attention] if self.context is None else self.context.hidden
        return compute(self.backbone, batch, routing or self.routing(batch), images)

    def routing(self, batch: PackedBatch, outputs: frozenset[str] = frozenset()) -> RoutingPass | None:
        """The routing of a forward pass with `outputs`; None where its routers choose once and their choices are not
        needed."""
        recomputed = self.reroutes and torch.is_grad_enabled()
        if batch.routed_experts is None and not outputs & ROUTES and not recomputed:
            return None

        connect_routers(self.backbone)
        return RoutingPass(batch.routed_experts, keeps_logits="expert_load" in outputs, recomputed=recomputed)

    def _dummy(self, outputs: frozenset[str]) -> TokenOutputs:
        token = np.zeros(1, np.int32)
        return self(self.pack([Trajectory(group=0, prompt_tokens=token, tokens=token)]), outputs)

    def _nothing(self, outputs: frozenset[str]) -> TokenOutputs:
        """Outputs of a batch without response tokens, from a pass over one token: a sharded model joins the passes of
        the other ranks."""
        empty = {}
        for name, row in vars(self._dummy(outputs)).items():
            empty[name] = None if row is None else row[:0]
        return TokenOutputs(**empty)

    def values_of(self, hidden: Tensor) -> Tensor:
        """[N] float32, reward units: the model's scalar head at hidden states [N, D].

        Raises:
            ValueError: the model has no scalar head.
        """
        raise NotImplementedError

    def values(self, batch: PackedBatch) -> Tensor:
        """[N] float32, reward units: the output `value` of `__call__`, computed alone.

        Law: `values[t]` is of the prompt and response tokens 0 … t-1.
        """
        if len(batch.target) == 0:
            return self._nothing(frozenset({"value"})).need("value")
        values: Tensor = self.run(self._values, batch)
        return values

    def _values(self, batch: PackedBatch) -> Tensor:
        with self.autocast():
            hidden = self.hidden(batch)
        return self.values_of(hidden)

    def __call__(self, batch: PackedBatch, needs: frozenset[str] = frozenset()) -> TokenOutputs:
        """The outputs of a forward pass; with gradient when grad is enabled.

        Args:
            needs: outputs besides those that the model always gives: `entropy`, `entropy_gradient`, `value`.
        """
        raise NotImplementedError
