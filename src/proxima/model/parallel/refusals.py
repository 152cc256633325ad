"""What can't be split over ranks, found before weights are loaded."""

from proxima.model.load import load_config, load_shape
from proxima.model.parallel.sharding import Sharding


def check_split(path: str, revision: str | None, sharding: Sharding, *, adapters: bool) -> None:
    """FieldError for a model that can't be split as `sharding` says; its config alone is read."""
    tensor, expert = sharding.tensor_parallel, sharding.expert_parallel
    if tensor > 1:
        from proxima.model.parallel.tensor import check_tensor_parallel

        check_tensor_parallel(load_config(path, revision), tensor, adapters=adapters, expert_ranks=expert)
    if expert > 1:
        from proxima.model.parallel.experts import check_experts

        check_experts(load_config(path, revision), sharding)
    if sharding.context_parallel > 1:
        from proxima.model.parallel.context import check_context

        check_context(load_shape(path, revision), sharding)
