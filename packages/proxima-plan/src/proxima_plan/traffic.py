"""The bytes that ranks send each other: layers and gradients, and traffic of the parallel dimensions of a layout."""

from dataclasses import dataclass
from typing import NamedTuple

from proxima_plan.devices import DeviceKind
from proxima_plan.layout import DeviceLayout
from proxima_plan.model_size import ModelFacts
from proxima_plan.step_load import Load

HALF = 2  # bytes of bfloat16
FULL = 4  # bytes of float32
BUCKET = 2**28  # bytes of new weights that a server is sent at once
PROBE = 264  # tokens with which servers prove that they have the new weights


@dataclass(frozen=True)
class PlacedModel:
    """A model on a layout.

    Args:
        master: bytes of a trained weight. gathered: bytes of a weight that a layer computes with.
        adapter: number of adapter weights, the only trained ones; None: without `model.lora`.
    """

    model: ModelFacts
    layout: DeviceLayout
    device: DeviceKind
    load: Load
    master: int = 4
    gathered: int = HALF
    adapter: int | None = None

    @property
    def trained(self) -> int:
        """The number of weights with a gradient."""
        return self.model.parameters if self.adapter is None else self.adapter

    @property
    def dense(self) -> int:
        """The number of weights that every token is multiplied with: no expert's, nor those of embeddings, which are
        looked up."""
        model = self.model
        table = model.vocabulary * model.hidden
        tables = max(1, round((model.parameters - model.layers * model.layer) / table))
        return model.parameters - model.all_of_experts - (tables - 1) * table


class Traffic(NamedTuple):
    """The traffic of one device: bytes, the best bytes per second, the number of collectives, and of nodes."""

    size: float
    rate: float
    times: float
    nodes: int


def blocking_traffic(placed: PlacedModel, tokens: float, micro: int, *, gradients: bool) -> dict[str, Traffic]:
    """Return the traffic that computation waits for, by group, of one pass over `tokens` tokens of a share in `micro`
    micro-batches."""
    sharding = placed.layout.sharding
    model = placed.model
    device = placed.device
    tensor = sharding.tensor_parallel
    context = sharding.context_parallel
    expert = sharding.expert_parallel
    passes = 2 + placed.load.checkpointing if gradients else 1  # the backward pass and a recomputation send as much
    count = passes * model.layers / placed.layout.pipeline
    own = tokens / context
    traffic = {}
    if tensor > 1:  # an all-reduce after attention and one after the rest of a layer
        size = count * 2 * own * model.hidden * HALF * 2 * (tensor - 1) / tensor
        traffic["tensor"] = Traffic(size, device.link(tensor), 2 * count * micro, device.nodes(tensor))
    # context: tokens for heads and back, of queries, keys, values, and the output; expert: a copy of each token to the
    # rank of each of its experts, and back
    heads = 2 * (model.query_width + model.kv_width) / tensor
    for name, group, width in (("context", context, heads), ("expert", expert, 2 * model.experts * model.hidden)):
        if group > 1:
            size = count * own * width * HALF * (group - 1) / group
            rate = device.exchange(group, tensor)
            nodes = device.nodes(group, tensor)
            traffic[name] = Traffic(size, rate, 2 * count * micro, nodes)
    return traffic


def overlapped_traffic(placed: PlacedModel, micro: int, *, gradients: bool) -> dict[str, Traffic]:
    """Return the traffic that overlaps with computation: gathering layers and summing gradients, dense ones over all
    ranks with the same tensor part, experts over the ranks that have the same ones."""
    layout = placed.layout
    sharding = placed.layout.sharding
    device = placed.device
    tensor = sharding.tensor_parallel
    expert = sharding.expert_parallel
    ranks = layout.ranks // (tensor * layout.pipeline)
    if sharding.kind == "hybrid":
        parts = min(ranks, max(1, device.node // tensor))
    else:
        parts = ranks
    experts = placed.model.all_of_experts
    share = placed.trained / placed.model.parameters
    traffic = {}
    for name, weights, split in (
        ("dense", placed.model.parameters - experts, 1),
        ("experts", experts / expert, expert),
    ):
        group = max(1, parts // split)
        stride = tensor * split
        whole = weights / (tensor * layout.pipeline)
        copies = ranks // split // group
        size = collectives = 0.0
        if sharding.kind != "replicate" and group > 1:
            again = 1 + (gradients and sharding.reshard_after_forward)
            if gradients:
                sums = 1
                if sharding.sum_gradients == "micro_batch":
                    sums = micro
            else:
                sums = 0
            size = whole * (group - 1) / group * (micro * again * placed.gathered + sums * FULL * share)
            collectives = placed.model.layers * (micro * again + sums)
        if size:
            traffic[f"gather {name}"] = Traffic(
                size, device.link(group, stride), collectives, device.nodes(group, stride)
            )
        if gradients and (copies > 1 or (sharding.kind == "replicate" and group > 1)):
            if sharding.kind == "replicate":
                between = group
                part = whole
                apart = stride
            else:
                between = copies
                part = whole / group
                apart = device.node
            size = 2 * FULL * share * part * (between - 1) / between
            rate = device.link(between, apart)
            nodes = device.nodes(between, apart)
            traffic[f"sum {name}"] = Traffic(size, rate, placed.model.layers, nodes)
    return traffic
