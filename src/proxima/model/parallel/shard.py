"""FSDP2 on a plain Hugging Face model: one unit per decoder layer, and one for the rest. What can't be split is refused
before weights are loaded, by config and shape.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from proxima.data import UserError
from proxima.model.architecture import SCALAR_HEAD, TextConfig, decoder_layers, exact_product
from proxima.model.parallel.context import check_context
from proxima.model.parallel.experts import check_experts, shard_experts
from proxima.model.parallel.mesh import Meshes, meshes_of
from proxima.model.parallel.sharding import Sharding, is_sharded
from proxima.model.parallel.tensor import check_tensor_parallel, fsdp_axis, split_tensors
from proxima.model.pretrained import load_config, load_shape

PASS = "packed_pass"  # the registered forward method of a sharded root
POLICY = "model.path"


def require_splittable(
    path: str, revision: str | None, sharding: Sharding, ranks: int = 0, *, adapters: bool, name: str = POLICY
) -> None:
    """Raise FieldError for a model that can't be split over ranks as `sharding` says; only its config is read. Raise
    UserError for a torch that is too old for ranks.

    Args:
        ranks: of the run; 0: unknown.
        adapters: the model is to get adapters.
        name: of the model in a message.
    """
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise UserError(f"ranks need torch 2.13 or newer, and {torch.__version__} is installed", remedy="update torch")
    if sharding.ranks_per_share * sharding.expert_parallel > 1:
        shape = partial(load_shape, path, revision)
        check_split(load_config(path, revision), shape, sharding, ranks, adapters=adapters, name=name)


def check_split(
    config: Any,
    shape: Callable[[], Any] | None,
    sharding: Sharding,
    ranks: int = 0,
    *,
    adapters: bool,
    name: str = POLICY,
) -> None:
    """`require_splittable` for a config of transformers and a function that returns the model without weights; None:
    skip the checks that need its modules."""
    if sharding.tensor_parallel > 1:
        check_tensor_parallel(config, sharding, ranks, adapters=adapters, name=name)
    model = None
    if shape is not None and sharding.context_parallel * sharding.expert_parallel > 1:
        model = shape()
    if sharding.expert_parallel > 1:
        check_experts(config, sharding, ranks, model, name=name)
    if sharding.context_parallel > 1:
        check_context(config, sharding, ranks, model, name=name)


def auxiliary_sharding(sharding: Sharding | None, path: str, revision: str | None = None) -> Sharding | None:
    """The sharding of a teacher or critic of a policy with this `sharding`: a model without experts has none to
    split."""
    if sharding is None or sharding.expert_parallel == 1:
        return sharding

    if TextConfig.of(load_config(path, revision)).experts:
        return sharding
    return replace(sharding, expert_parallel=1)


def shard_model(model: nn.Module, sharding: Sharding, device: torch.device) -> None:
    """Shard a model in place over all ranks, of which this one computes on `device`; its weights may be on the meta
    device. Collective, and every rank must hold the same weights.

    Gradients are sums over the ranks: FSDP divides by nothing. Whatever reads the weights must run within
    `model.packed_pass(function)`, a forward of the root, and return tensors or a dict of them.
    """
    meshes = meshes_of(sharding, device)
    settings = _settings(model, meshes, sharding)
    if meshes.tensor is not None:
        shards = meshes.shards.size(-1)
        split_tensors(model, meshes.tensor, shards)
        settings["shard_placement_fn"] = fsdp_axis(shards)
    head = getattr(model, SCALAR_HEAD, None)
    if isinstance(head, nn.Linear):
        shard_head(head, sharding, device)
    shard_experts(model, meshes, sharding, settings)
    for layer in decoder_layers(model):
        fully_shard(layer, **settings, reshard_after_forward=sharding.reshard_after_forward)
    if meshes.expert is not None:
        prefetch_layers(list(decoder_layers(model)))
    for unit in _outer_units(model):
        fully_shard(unit, **settings, reshard_after_forward=True)
    # Also the root: unsharded weights that a forward without gradient left behind would outlive an optimizer step. Its
    # inputs are no activations, so they keep their dtype (temperatures among them).
    settings["mp_policy"] = replace(settings["mp_policy"], cast_forward_inputs=False)
    fully_shard(model, **settings, reshard_after_forward=True)
    setattr(model, PASS, _call)
    register_fsdp_forward_method(model, PASS)
    _sum_gradients(model)


def prefetch_layers(layers: Sequence[nn.Module]) -> None:
    """Let each sharded layer gather the next one with its experts, a unit of their own, before it computes, and in the
    backward pass the one before. By default FSDP gathers a unit when the host reaches it, and with experts that the
    ranks split, the host waits in each layer for the numbers of rows: the network would be idle meanwhile. A layer
    whose experts are gathered early takes their memory early, as one more layer at once."""
    units: list[list[Any]] = [list(filter(is_sharded, layer.modules())) for layer in layers]
    for unit, after in pairwise(units):
        unit[0].set_modules_to_forward_prefetch(after)
        # what a backward pass needs first comes last in a layer
        after[0].set_modules_to_backward_prefetch(unit[::-1])


def shard_head(head: nn.Linear, sharding: Sharding, device: torch.device) -> None:
    """Shard a scalar head in place, as a unit that always computes in float32 or wider. Collective."""
    settings = _settings(head, meshes_of(sharding, device), sharding)
    settings["mp_policy"] = MixedPrecisionPolicy(cast_forward_inputs=False)
    head.forward = MethodType(lambda self, hidden: _own(exact_product(hidden, self.weight)), head)  # type: ignore[method-assign]  # of this layer alone
    fully_shard(head, **settings, reshard_after_forward=True)
    _sum_gradients(head)


def _outer_units(model: nn.Module) -> list[Any]:
    """Embedding, and final norm with the head, unless they share a weight: then all stay in the root's unit."""
    untyped: Any = model
    embedding = untyped.get_input_embeddings()
    head = untyped.get_output_embeddings()
    if head is None:
        return [embedding]
    shared = {id(p) for p in embedding.parameters()} & {id(p) for p in head.parameters()}
    backbone = untyped.get_decoder() if hasattr(untyped, "get_decoder") else untyped.base_model
    children = list(backbone.children())
    last = max((i for i, child in enumerate(children) if isinstance(child, nn.ModuleList)), default=len(children))
    norms = [child for child in children[last + 1 :] if next(child.parameters(), None) is not None]
    if shared or len(norms) != 1:
        return []
    return [embedding, [norms[0], head]]


def _settings(module: nn.Module, meshes: Meshes, sharding: Sharding) -> dict[str, Any]:
    mesh = meshes.shards
    offload = OffloadPolicy()
    if sharding.offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    reduced = torch.promote_types(next(module.parameters()).dtype, torch.float32)
    gathered = sharding.gathered_dtype
    precision = MixedPrecisionPolicy(gathered, reduced, cast_forward_inputs=gathered is not None)
    return {"mesh": mesh, "mp_policy": precision, "offload_policy": offload}


def _sum_gradients(model: nn.Module) -> None:
    units: Any = filter(is_sharded, model.modules())
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo supports no other, and none is needed
        # a rank's loss may leave out an output that another rank's reads: both must join the same reductions
        unit.set_reduce_scatter_unused_params(True, recurse=False)


def _call(function: Callable[[], Tensor | dict[str, Tensor | None]]) -> Any:
    result = function()
    if isinstance(result, Tensor):
        return _own(result)
    own = {}
    for name, tensor in result.items():
        own[name] = None if tensor is None else _own(tensor)
    return own


def _own(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of a view: an in-place operation on a view would drop the hook that starts the backward
    pass."""
    return tensor.clone() if tensor._is_view() else tensor
