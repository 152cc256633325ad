"""Rank 0 of a group whose other ranks do not exist: collectives return at once, with tensors of the right shape."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from proxima.model.parallel import experts
from proxima.model.parallel.gather import clip_gradients, total_norm
from proxima.model.parallel.sharding import is_sharded
from proxima.training.ranks import ALONE, Ranks

T = TypeVar("T")


@contextmanager
def fake_ranks(count: int, ranks_per_share: int = 1) -> Iterator[Ranks]:
    """Yield the ranks, with a torch process group of them inside the context; a count of 1 needs no group. Every
    `ranks_per_share` neighbours compute the same share.

    Raises:
        RuntimeError: this process has a process group already.
    """
    if count == 1:
        yield ALONE
        return
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    original = experts.host_counts
    experts.host_counts = _even_counts
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield _FakeRanks(count, ranks_per_share)
    finally:
        dist.destroy_process_group()
        experts.host_counts = original


def _even_counts(sent: Tensor, received: Tensor, ranks: int, rows: int) -> tuple[list[int], list[int]]:
    """Give every expert equally many tokens; the host waits for the counts as in a real run."""
    sent.tolist()
    of_each = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
    most = -(-rows // ranks)  # rounded up
    return of_each, [most] * ranks


class _FakeRanks(Ranks):
    """Ranks that all do the same as this one."""

    norm = staticmethod(total_norm)

    def __init__(self, count: int, ranks_per_share: int = 1) -> None:
        self.size = count
        self.ranks_per_share = ranks_per_share

    def gather(self, value: T) -> list[T]:
        return [value] * self.size

    def gather_shares(self, value: T, *, device: Any = "cpu") -> list[T]:
        return [value] * self.shares

    def clip(self, parameters: Iterable[nn.Parameter], most: float, norm: Tensor) -> None:
        clip_gradients(parameters, most, norm)


def whole_gradients(model: nn.Module) -> Iterator[Tensor]:
    """Yield the gradients that a sharded model keeps whole until its ranks add them up; a plain model has none."""
    for module in model.modules():
        if is_sharded(module):
            sharded: Any = module
            for group in sharded._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:  # the dtype of the reduction decides which of the two is set
                    whole = getattr(parameter, "_unsharded_param", None)
                    gradient = None if whole is None else whole.grad
                    gradients = (parameter.unsharded_accumulated_grad, gradient)
                    yield from (gradient for gradient in gradients if gradient is not None)
