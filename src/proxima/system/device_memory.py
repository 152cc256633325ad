"""The memory of a GPU that torch has used."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class PeakMemory(NamedTuple):
    """Bytes of tensors, and of these with what torch's allocator holds for later ones."""

    allocated: int
    reserved: int


def take_peak_memory(device: "torch.device") -> PeakMemory | None:
    """Return the peak on a GPU since the last call, and start anew; None for another device."""
    if device.type != "cuda":
        return None
    from torch import cuda

    peak = PeakMemory(cuda.max_memory_allocated(device), cuda.max_memory_reserved(device))
    cuda.reset_peak_memory_stats(device)
    return peak
