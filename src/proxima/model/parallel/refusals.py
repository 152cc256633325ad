"""Refuses models that can't be split over ranks before their weights are loaded, by config and shape."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from proxima.data import UserError
from proxima.model.parallel.context import check_context
from proxima.model.parallel.experts import check_experts, expert_count
from proxima.model.parallel.sharding import Sharding
from proxima.model.parallel.tensor import check_tensor_parallel
from proxima.model.pretrained import load_config, load_shape

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
    if sharding.together * sharding.expert_parallel > 1:
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
    model = None if shape is None or sharding.context_parallel * sharding.expert_parallel == 1 else shape()
    if sharding.expert_parallel > 1:
        check_experts(config, sharding, ranks, model, name=name)
    if sharding.context_parallel > 1:
        check_context(config, sharding, ranks, model, name=name)


def sharding_beside(sharding: Sharding | None, path: str, revision: str | None = None) -> Sharding | None:
    """The sharding of a teacher or critic of a policy with this `sharding`: a model without experts has none to
    split."""
    if sharding is None or sharding.expert_parallel == 1:
        return sharding

    return sharding if expert_count(load_config(path, revision)) else replace(sharding, expert_parallel=1)
