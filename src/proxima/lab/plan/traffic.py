"""The bytes that ranks send each other: layers and gradients, and traffic of the parallel dimensions of a layout."""

from dataclasses import dataclass, field
from typing import NamedTuple

from proxima.config.model_size import ModelFacts
from proxima.lab.plan.devices import DeviceKind
from proxima.lab.plan.layout import DeviceLayout
from proxima.lab.plan.rates import Rates

HALF, FULL = 2, 4  # bytes of bfloat16 and float32


@dataclass(frozen=True)
class Weights:
    """The number of weights of a model by use.

    Args:
        dense: multiplied with every token. routed: expert weights that one token uses. experts: weights of all experts.
    """

    dense: float
    routed: float
    experts: float

    @classmethod
    def of(cls, model: ModelFacts) -> "Weights":
        embeddings = max(1, round((model.parameters - model.layers * model.layer) / (model.vocabulary * model.hidden)))
        looked_up = (embeddings - 1) * model.vocabulary * model.hidden if model.layer else 0
        if not model.active:
            return cls(model.parameters - looked_up, 0.0, 0.0)
        experts = (model.parameters - model.active) / (1 - model.experts / model.all_experts)
        return cls(model.parameters - experts - looked_up, experts * model.experts / model.all_experts, experts)


@dataclass(frozen=True)
class PlacedModel:
    """A model on a layout.

    Args:
        master: bytes of a trained weight. gathered: bytes of a weight that a layer computes with.
        checkpointing: layers are recomputed in the backward pass.
        micro_tokens: most tokens of a micro-batch.
        adapter: number of adapter weights, the only trained ones; None: without `model.lora`.
        eager: engines launch each kernel of a decode step separately, without CUDA graphs.
    """

    model: ModelFacts
    layout: DeviceLayout
    device: DeviceKind
    rates: Rates
    master: int = 4
    gathered: int = HALF
    checkpointing: bool = True
    micro_tokens: int = 8192
    adapter: int | None = None
    eager: bool = False
    weights: Weights = field(init=False)

    @property
    def trained(self) -> int:
        """The number of weights with a gradient."""
        return self.model.parameters if self.adapter is None else self.adapter

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", Weights.of(self.model))


class Traffic(NamedTuple):
    """The traffic of one device: bytes, the best bytes per second, the number of collectives, and of nodes."""

    size: float
    rate: float
    times: float
    nodes: int


@dataclass(frozen=True)
class StageTraffic:
    """Traffic by group: that which computation waits for, and that which overlaps with it."""

    blocking: dict[str, Traffic]
    overlapped: dict[str, Traffic]


def traffic_of(placed: PlacedModel, tokens: float, micro: int, *, gradients: bool) -> StageTraffic:
    """Return the traffic of one pass over `tokens` tokens of a share, in `micro` micro-batches."""
    sharding, model, device = placed.layout.sharding, placed.model, placed.device
    tensor, context, expert = sharding.tensor_parallel, sharding.context_parallel, sharding.expert_parallel
    passes = 2 + placed.checkpointing if gradients else 1  # the backward pass and a recomputation send as much
    layers = model.layers / placed.layout.pipeline
    count, own = passes * layers, tokens / context
    blocking = {}
    if tensor > 1:  # an all-reduce after attention and one after the rest of a layer
        size = count * 2 * own * model.hidden * HALF * 2 * (tensor - 1) / tensor
        blocking["tensor"] = Traffic(size, device.link(tensor), 2 * count * micro, device.nodes(tensor))
    if context > 1:  # tokens for heads and back: queries, keys, values, and the output
        width = 2 * (model.query_width or model.hidden) + 2 * model.kv_width
        size = count * own * width / tensor * HALF * (context - 1) / context
        blocking["context"] = Traffic(
            size, device.exchange(context, tensor), 2 * count * micro, device.nodes(context, tensor)
        )
    if expert > 1:  # a copy of each token to the rank of each of its experts, and back
        size = count * 2 * own * model.experts * model.hidden * HALF * (expert - 1) / expert
        blocking["expert"] = Traffic(
            size, device.exchange(expert, tensor), 2 * count * micro, device.nodes(expert, tensor)
        )
    return StageTraffic(blocking, _gathered(placed, micro, gradients=gradients))


def _gathered(placed: PlacedModel, micro: int, *, gradients: bool) -> dict[str, Traffic]:
    """Return the traffic of gathering layers and summing gradients: dense ones over all ranks with the same tensor
    part, experts over the ranks that have the same ones."""
    layout, sharding, device = placed.layout, placed.layout.sharding, placed.device
    tensor, expert = sharding.tensor_parallel, sharding.expert_parallel
    ranks = layout.ranks // (tensor * layout.pipeline)
    parts = min(ranks, max(1, device.node // tensor)) if sharding.kind == "hybrid" else ranks
    experts, share = placed.weights.experts, placed.trained / placed.model.parameters
    traffic = {}
    for name, weights, stride in (
        ("dense", placed.model.parameters - experts, tensor),
        ("experts", experts / expert, tensor * expert),
    ):
        group = max(1, parts // (expert if name == "experts" else 1))
        whole = weights / (tensor * layout.pipeline)
        copies = ranks // (expert if name == "experts" else 1) // group
        size = collectives = 0.0
        if sharding.kind != "replicate" and group > 1:
            again = 1 + (gradients and sharding.reshard_after_forward)
            sums = (micro if sharding.sum_gradients == "micro_batch" else 1) if gradients else 0
            size = whole * (group - 1) / group * (micro * again * placed.gathered + sums * FULL * share)
            collectives = placed.model.layers * (micro * again + sums)
        if size:
            traffic[f"gather {name}"] = Traffic(
                size, device.link(group, stride), collectives, device.nodes(group, stride)
            )
        if gradients and (copies > 1 or (sharding.kind == "replicate" and group > 1)):
            between, part = (group, whole) if sharding.kind == "replicate" else (copies, whole / group)
            apart = stride if sharding.kind == "replicate" else device.node
            size = 2 * FULL * share * part * (between - 1) / between
            rate, nodes = device.link(between, apart), device.nodes(between, apart)
            traffic[f"sum {name}"] = Traffic(size, rate, placed.model.layers, nodes)
    return traffic
