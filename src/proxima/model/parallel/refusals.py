"""What can't be split over ranks, found before weights are loaded."""

from collections.abc import Callable
from typing import Any

from proxima.model.parallel.sharding import Sharding


def check_split(config: Any, shape: Callable[[], Any], sharding: Sharding, *, adapters: bool) -> None:
    """FieldError for a model of this config, which `shape` gives without weights, that `sharding` can't split."""
    tensor, expert = sharding.tensor_parallel, sharding.expert_parallel
    if tensor > 1:
        from proxima.model.parallel.tensor import check_tensor_parallel

        check_tensor_parallel(config, tensor, adapters=adapters, expert_ranks=expert)
    if expert > 1:
        from proxima.model.parallel.experts import check_experts

        check_experts(config, sharding)
    if sharding.context_parallel > 1:
        from proxima.model.parallel.context import check_context

        check_context(shape(), sharding)
