"""What a CUDA graph does, on a CPU: what a function computes is recorded operation by operation, and repeated over the
same memory, without the Python that led to it."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: operations that wait for the device or copy from the host, so that no graph can hold them
FORBIDDEN = {"_local_scalar_dense", "lift_fresh", "nonzero", "is_nonzero", "unique_dim", "_unique2", "masked_select"}


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        chosen = name.startswith("index") and any(
            isinstance(value, Tensor) and value.dtype == torch.bool for value in tree_leaves(args[1:2])
        )
        assert name not in FORBIDDEN and not chosen, f"{name} can't be in a graph"
        out = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, out))
        return out


def recorded(launch: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """As `GraphedSteps.record`."""
    with _Recorder() as recorder:
        out = launch()

    def replay():
        for function, args, kwargs, before in recorder.calls:
            given = function(*args, **kwargs)
            for place, value in zip(tree_leaves(before), tree_leaves(given), strict=True):
                if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)

    with torch.no_grad():
        return replay, out
