"""Expert parallel: each rank holds some experts of every layer, and ranks send each other the tokens for them.

Tokens of all ranks of the group are sent to the rank that holds an expert, so its gradient is the sum over the group;
FSDP adds up those of the ranks that hold the same experts.

    router's choices [T, K] → sorted by expert → counts exchanged → rows sent → own experts → rows sent back
    → times the router's weights, summed over K

The host waits for the device once per layer, for the counts, and once more where a layer is recomputed.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from proxima.data import require
from proxima.data.errors import nearest_divisor
from proxima.model.architecture import TextConfig
from proxima.model.moe import OtherWeights, stacked_experts
from proxima.model.parallel.mesh import Meshes, exchange
from proxima.model.parallel.sharding import Sharding, plain_type

FIELD = "placement.expert_parallel"


def check_experts(config: Any, sharding: Sharding, ranks: int = 0, model: Any = None, *, name: str) -> None:
    """`check_split` for expert parallelism; `model` may lack its weights, and None is not checked."""
    parts = sharding.expert_parallel
    count = TextConfig.of(config).experts
    require(count > 0, FIELD, parts, f"splits experts, and {name} has none", remedy="set it to 1")
    legal = nearest_divisor(parts, math.gcd(count, ranks // sharding.tensor_parallel))
    require(count % parts == 0, FIELD, parts, f"must divide the {count} experts", remedy=f"set it to {legal}")
    stacked = model is None or next(stacked_experts(model), None) is not None
    require(stacked, FIELD, parts, "has no plan for a model whose experts are not stacked", remedy="set it to 1")


def shard_experts(model: Any, meshes: Meshes, sharding: Sharding, settings: dict[str, Any]) -> None:
    """Split the experts of a model in place over `meshes.expert`, and each part, a unit of FSDP with these settings,
    over `meshes.expert_shards`."""
    if meshes.expert is None or meshes.expert_shards is None:
        return
    policy = replace(settings["mp_policy"], cast_forward_inputs=False)
    axis = _even_axis(meshes.expert_shards.size(-1), meshes.expert.size())
    settings = settings | {"mesh": meshes.expert_shards, "mp_policy": policy, "shard_placement_fn": axis}
    for experts in list(stacked_experts(model)):
        split_rows(experts, meshes.expert)
        experts.forward = MethodType(_exchanging(meshes.expert), experts)
        fully_shard(experts, **settings, reshard_after_forward=sharding.reshard_after_forward)


def _even_axis(shards: int, parts: int) -> Callable[[nn.Parameter], Shard | None]:
    """Choose the axis of an expert weight, in `parts`, that FSDP splits over `shards` ranks: a rank's experts, or the
    rows if only these divide evenly."""

    def axis(weight: nn.Parameter) -> Shard | None:
        if len(weight) // parts % shards == 0 or weight.dim() == 1 or weight.shape[1] % shards:
            return None
        return Shard(1)

    return axis


def split_rows(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's rows of a module's own weights, of which each rank has all; on the ranks' device, unless they
    are on the meta device."""
    for name, weight in list(module.named_parameters(recurse=False)):
        own = weight.detach().chunk(mesh.size())[mesh.get_local_rank()]
        if not own.is_meta:
            own = own.to(mesh.device_type, copy=True)  # no device holds the whole weight
        size = weight.shape
        stride = weight.stride()
        split = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=size, stride=stride)
        module.register_parameter(name, nn.Parameter(split, requires_grad=weight.requires_grad))


def with_own_rows(module: Any, settings: dict[str, Any], *given: Tensor) -> Tensor:
    """Run a module's forward pass with this rank's rows of its weights, and with other settings."""
    local = {name: weight.to_local() for name, weight in module.named_parameters(recurse=False)}
    states: Tensor = plain_type(module).forward(OtherWeights(module, local, **settings), *given)
    return states


def _exchanging(mesh: DeviceMesh) -> Any:
    """The forward method of experts, extended to the experts and tokens of all ranks of a mesh."""

    def forward(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        group = mesh.get_group()
        ranks = mesh.size()
        choices = top_k_index.shape[1]
        chosen, order = top_k_index.flatten().sort(stable=True)
        edges = torch.arange(experts.num_experts + 1, device=hidden.device)
        sent = torch.searchsorted(chosen, edges).diff()  # [experts] rows for each
        received = torch.empty_like(sent)  # [ranks · own experts] rows of each rank for each
        dist.all_to_all_single(received, sent, group=group)
        there, here = host_counts(sent, received, ranks, len(order))
        rows = exchange(hidden[order // choices], here, there, group)
        count = experts.num_experts // ranks
        expert = torch.arange(count, device=hidden.device).repeat(ranks)
        expert = expert.repeat_interleave(received, output_size=len(rows))
        own_weights = rows.new_ones(len(rows), 1)
        results = with_own_rows(experts, {"num_experts": count}, rows, expert[:, None], own_weights)
        if rows.requires_grad and not results.requires_grad:  # no expert has run; the other ranks wait in backward
            results = rows * 0
        back = exchange(results, there, here, group)
        weighted = back * top_k_weights.flatten()[order, None]
        summed: Tensor = weighted[order.argsort()].view(*top_k_index.shape, -1).sum(1)
        return summed.to(hidden.dtype)

    return forward


def host_counts(sent: Tensor, received: Tensor, ranks: int, rows: int) -> tuple[list[int], list[int]]:
    """The numbers of rows sent to each rank, `rows` in all, and received from each; waits for the device once. A
    rehearsal, in which tensors have no values, replaces this function by even counts."""
    there, here = torch.stack((sent, received)).view(2, ranks, -1).sum(2).tolist()
    return there, here
