"""The bytes that the trainer holds at once on one device, alone or as one of several ranks.

It adds up, term by term, what autograd and FSDP keep of a Llama-like decoder at the peak: the loss of an update's last
micro-batch. `proxima rehearse` counts the same tensor by tensor, and a benchmark compares both with processes that
train (`benchmarks/rank_memory`).
"""

import math
import os
from dataclasses import dataclass, replace
from typing import Any

from proxima.config.model_size import ModelFacts
from proxima.config.sections import PLACEMENTS
from proxima.config.sections.model_section import ModelConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ACTIVATIONS = "activations of a micro-batch"
LOGITS = "logits"
MOMENTS, MOMENTUM = "Adam's two moments", "Muon's momentum"
GATHERED = "gathered layers"
DEFAULT_RANKS, NODE = 2, 8  # assumed ranks of a torchrun that has not started; of an unknown node
LAYERS_AT_ONCE = 3  # the one that computes, the next one, and the buffer that it is gathered in


@dataclass(frozen=True)
class Share:
    """The share of a trained model that one rank holds.

    Args:
        ranks: the ranks of the run.
        sharding: a `Sharding`; None: one process, which holds the model whole.
    """

    ranks: int = 1
    sharding: Any = None

    @property
    def parts(self) -> int:
        """The number of ranks that a model is split over."""
        kind = "replicate" if self.sharding is None else self.sharding.kind
        if kind == "hybrid":
            per_node = self.sharding.ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", NODE))
            return min(self.ranks, per_node)
        return self.ranks if kind == "full" else self.tensor

    @property
    def tensor(self) -> int:
        """The number of ranks that a layer's matrices are split over."""
        return 1 if self.sharding is None else int(self.sharding.tensor_parallel)

    @property
    def context(self) -> int:
        """The number of ranks that the tokens of a micro-batch are split over."""
        return 1 if self.sharding is None else int(self.sharding.context_parallel)

    @property
    def shares(self) -> int:
        """The number of parts that an update is split into."""
        return max(1, self.ranks // (self.tensor * self.context))

    def local(self, model: ModelFacts) -> ModelFacts:
        """The model that a rank computes with after gathering a layer: all widths that a tensor group splits are
        divided by its size; the states between the layers are not split."""
        t, e = self.tensor, 1 if self.sharding is None else self.sharding.expert_parallel
        layer, experts = model.layer or model.parameters // model.layers, 0
        if model.all_experts:
            experts = round((model.parameters - model.active) / (1 - model.experts / model.all_experts) / model.layers)
        own = (layer - experts) // t + experts // (t * e)
        return replace(
            model,
            parameters=model.layers * own + max(0, model.parameters - model.layers * layer) // t,
            intermediate=model.intermediate // t,
            query_width=(model.query_width or model.hidden) // t,
            kv_width=max(1, model.kv_width // t),
            vocabulary=math.ceil(model.vocabulary / t),
            layer=own,
        )

    @property
    def offloads(self) -> bool:
        return self.sharding is not None and bool(self.sharding.offload)

    @property
    def splits_gradients(self) -> bool:
        return self.sharding is None or bool(self.sharding.splits_gradients)


def rank_share(placement: Any) -> Share:
    """The share of a rank. Only torchrun knows the number of its ranks: it is taken from WORLD_SIZE, or else the
    smallest that the groups allow, at least `DEFAULT_RANKS`."""
    if placement is None or PLACEMENTS.holds(placement, "local"):
        return Share()
    from proxima.config.sections.ranks_section import launched_ranks
    from proxima.model.parallel.sharding import Sharding

    sharding = Sharding.of(placement)
    otherwise = math.lcm(DEFAULT_RANKS, sharding.together, sharding.expert_parallel)
    return Share(getattr(placement, "ranks", None) or launched_ranks() or otherwise, sharding)


@dataclass(frozen=True)
class Forwarded:
    """The largest micro-batch of a rank.

    Args:
        tokens: tokens forwarded; if ranks split them, this rank's part.
        keys: keys that its queries attend to, those of a shared prompt once for each of its completions; also this
            rank's part.
        masked: queries × keys of the rows that attend to a prompt, whose mask every layer keeps.
        alone: the update has no other micro-batch: gradients are allocated as activations are freed.
        fused: the forward uses `model.fused_backbone`.
    """

    tokens: int
    keys: int
    masked: int = 0
    alone: bool = False
    fused: bool = False


def training_memory(
    spec: ModelConfig, model: ModelFacts, forwarded: Forwarded, share: Share, optimizer: Any = None
) -> dict[str, int]:
    """The trainer's bytes by purpose; some may be 0. `optimizer`: its spec; None, or one without `moments`: AdamW's."""
    p, compute, master = model.parameters, BYTES[spec.compute_dtype], BYTES[spec.dtype]
    gathered = 2 if getattr(share.sharding, "param_dtype", None) == "bfloat16" else master
    here = 0 if share.offloads else 1
    own = share.local(model)
    activations = _activations(spec, own, forwarded, gathered)
    trained = p if spec.lora is None else model.adapter or 0
    element = master if spec.lora is None else 4
    if share.splits_gradients or forwarded.alone:
        gradients = here * trained * element // share.parts
    else:
        gradients = (own.parameters if spec.lora is None else trained) * 4
    if forwarded.alone:
        gradients = max(0, gradients - activations)
    momentum, moments = _moments(spec, model, optimizer)
    rest_on_host = share.offloads or getattr(optimizer, "offload", False)
    layer = own.layer
    rounded = compute != gathered
    cast_again = spec.gradient_checkpointing and (share.sharding is not None or forwarded.fused)
    kept_layers = 1 if cast_again else model.layers
    logits = _logits(spec, own, forwarded.tokens, gathered, compute)
    turn = max(0, _between_layers(spec, own, forwarded, share, gathered) - logits)  # never alive with the logits
    kept = 0
    if share.sharding is not None:
        whole = not share.sharding.reshard_after_forward
        kept = own.parameters if whole else max(0, own.parameters - model.layers * layer)
    return {
        "weights": here * p * master // share.parts,
        "adapter": here * (model.adapter or 0) * 4 // share.parts,
        "gradients": gradients,
        MOMENTUM: 0 if rest_on_host else momentum // share.parts,
        MOMENTS: 0 if rest_on_host else moments // share.parts,
        "autocast copy of the weights": kept_layers * layer * compute if rounded else 0,
        GATHERED: kept * gathered + (turn if share.sharding is not None else 0),
        ACTIVATIONS: activations + (turn if share.sharding is None else 0),
        LOGITS: logits,
    }


def offloaded_memory(spec: ModelConfig, model: ModelFacts, share: Share, optimizer: Any = None) -> int:
    """The bytes of a rank's weights, gradients and moments that are kept in host memory."""
    moments = sum(_moments(spec, model, optimizer)) // share.parts
    if not share.offloads:
        return moments if getattr(optimizer, "offload", False) else 0
    adapter = model.adapter or 0
    trained = model.parameters if spec.lora is None else adapter
    whole = (model.parameters * BYTES[spec.dtype] + adapter * 4) // share.parts
    return whole + moments + trained * 4 // share.parts


def _moments(spec: ModelConfig, model: ModelFacts, optimizer: Any) -> tuple[int, int]:
    """The bytes of Muon's momentum and of Adam's moments, for the whole model."""
    if spec.lora is not None or not hasattr(optimizer, "moments"):
        return 0, 8 * (model.parameters if spec.lora is None else model.adapter or 0)
    layer = model.layer or model.parameters // model.layers
    if model.experts:  # weights outside the experts: queries, keys, values and output
        layer = 2 * model.hidden * ((model.query_width or model.hidden) + model.kv_width)
    matrices = model.layers * layer
    momentum, moments = optimizer.moments(matrices, model.parameters - matrices)
    return momentum, moments


def _activations(spec: ModelConfig, model: ModelFacts, forwarded: Forwarded, residual: int) -> int:
    """The bytes that the layers keep for the backward pass. `residual`: bytes of an element between the layers."""
    states, layer = forwarded.tokens * residual * model.hidden, _of_layer(spec, model, forwarded, residual)
    ends = 4 * states  # embeddings, the last norm, and the states that predict
    if spec.gradient_checkpointing:
        added = forwarded.tokens * BYTES[spec.compute_dtype] * model.hidden if forwarded.fused else 0
        return model.layers * (states + added) + layer + ends
    return model.layers * layer + ends


def _of_layer(spec: ModelConfig, model: ModelFacts, forwarded: Forwarded, residual: int) -> int:
    """The bytes that one layer keeps, without checkpointing or while it is recomputed."""
    h, i, e = model.hidden, model.intermediate, BYTES[spec.compute_dtype]
    queries, tokens = model.query_width or h, forwarded.tokens
    if forwarded.fused:  # two sums and their norms; q, k, v; the output of attention; gate and up
        return tokens * (2 * (residual + e) * h + e * (2 * queries + 2 * model.kv_width + 2 * i))
    norms = 2 * (4 + residual) * h  # the input in float32, and divided by its norm
    inputs = (5 if e < residual else 2) * e * h  # autocast rounds one for each of q, k, v, gate and up
    attention = 3 * e * queries  # queries, the output, and the output in token order
    keys = 2 * e * queries  # keys and values, repeated for each head of the queries
    of_heads = (4 + e) * (queries + model.kv_width) if model.normed else 0
    gated = 4 * e * i + 2 * e * model.experts * h
    return tokens * (norms + inputs + attention + of_heads + gated) + forwarded.keys * keys + forwarded.masked * e


def _between_layers(spec: ModelConfig, model: ModelFacts, forwarded: Forwarded, share: Share, residual: int) -> int:
    """The bytes that exist only during the backward pass of a layer: gradients in flight, the head's gradient, and, for
    a sharded model, whole layers and the buffers that sum their gradients, beyond what the layer frees."""
    e, layer = BYTES[spec.compute_dtype], model.layer or model.parameters // model.layers
    passing = forwarded.tokens * (2 * e * model.intermediate + 2 * residual * model.hidden)
    if spec.lora is None:
        passing += model.vocabulary * model.hidden * residual
    if share.sharding is None:
        return passing
    whole = LAYERS_AT_ONCE * layer if share.sharding.reshard_after_forward else layer
    sums = layer * (residual + 4) if spec.lora is None else 0
    return passing + whole * residual + max(0, sums - _of_layer(spec, model, forwarded, residual))


def _logits(spec: ModelConfig, model: ModelFacts, tokens: int, element: int, compute: int) -> int:
    """The rounded head, and the larger of two: a chunk of logits with its softmax; or a chunk of their gradient with
    that of the head, which grows chunk by chunk."""
    chunk, head = min(spec.log_prob_chunk, tokens) * model.vocabulary, model.vocabulary * model.hidden
    rounded = head * compute if compute != element else 0
    gradient = 0 if spec.lora is not None else head * (compute + element)
    return rounded + max(chunk * (compute + 8), chunk * (compute + 4) + gradient)
