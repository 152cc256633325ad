"""How torch's allocator keeps the memory of a GPU."""

import os
from typing import Any

import torch

SET_BY_USER = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"


def grow_segments(device: torch.device) -> bool:
    """Let the allocator of this process extend its segments, so that batches of ever new lengths do not leave gaps that
    none of them fits; return whether it does. No effect where the environment sets the allocator, and off a GPU.

    It is set in the process, not in its environment: a server that the process starts would inherit it, and the
    allocator with which vLLM sleeps refuses it. Memory in such segments reaches another process only by file
    descriptors that the kernel may keep from it, so a run that hands its memory to servers (`engine.transfer=ipc`)
    does not call this.
    """
    setter: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # since torch 2.9
    if device.type != "cuda" or setter is None or any(name in os.environ for name in SET_BY_USER):
        return False
    setter(EXPANDABLE)
    return True
