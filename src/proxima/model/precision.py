"""The dtype of matrix products where a recipe leaves it to the machine, `auto`: on a GPU bfloat16, on a CPU the faster
of bfloat16 and float32, by measurement. A processor without bfloat16 instructions emulates its products, at up to 30
times the time, in the orientation of the gradient of the input most of all.

`product_rate` is what a device makes of them, beside which a run shows its own rate.

A run decides once, before it loads anything, and records the outcome (`config.outcomes`); whoever builds an engine or a
model in Python without a config gets the decision of this process.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from proxima.model.pretrained import DTYPES, resolve_device
from proxima.system.machine import gemm_rate, processor_name

# of matrix products; a field with this type is decided by `config.outcomes`, whatever its name
ComputeDtype = Literal["auto", "bfloat16", "float32"]
Decided = Literal["bfloat16", "float32"]
DECIDED: tuple[Decided, ...] = ("bfloat16", "float32")
# float32 is taken only if it is faster by this factor: bfloat16 halves the caches of keys and values, and processors
# that multiply both at one speed would otherwise alternate between two starts
MARGIN = 1.1
SIZES = (128, 256)  # of the matrices, the small ones first
DECISIVE = 3.0  # a ratio of the small products beyond which the larger are not measured: emulation is slow
REPEATS = 3
SMALL_PRODUCT = 384  # the size from which the rate of products on a CPU no longer grows


@dataclass(frozen=True)
class DtypeChoice:
    """The dtype that `auto` becomes, and why, in words that follow its name and a colon."""

    dtype: Decided
    reason: str


def compute_dtype(name: str, device: str | torch.device, weights: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype of products that a setting names: a name of `DTYPES`, or `auto`, the choice of this process.

    Args:
        weights: the dtype of the master weights; products of bfloat16 weights are in bfloat16.
    """
    if name != "auto":
        return DTYPES[name]
    if weights == torch.bfloat16:
        return torch.bfloat16
    return DTYPES[dtype_choice(str(device)).dtype]


def dtype_choice(device: str) -> DtypeChoice:
    """What `auto` becomes on a device, the same at every call of a process. On a CPU, the first call measures: some
    5 ms with bfloat16 instructions, some 20 ms without."""
    kind = resolve_device(device)
    return _measured() if kind.type == "cpu" else _on_gpu(kind)


def _on_gpu(device: torch.device) -> DtypeChoice:
    nvidia = torch.cuda.is_available() and torch.version.hip is None
    if nvidia and torch.cuda.get_device_capability(device) < (8, 0):
        return DtypeChoice("float32", f"{torch.cuda.get_device_name(device)} has no bfloat16 instructions")
    return DtypeChoice("bfloat16", "a GPU multiplies it fastest")


@cache
def _measured() -> DtypeChoice:
    """The choice on this CPU."""
    ratio = speed_ratio()
    dtype: Decided = "float32" if ratio * MARGIN < 1 else "bfloat16"
    reason = f"bfloat16 products are {ratio:.2g} × as fast on this processor"
    if dtype == "bfloat16" and ratio < 1:
        reason += ", and halve the caches"
    return DtypeChoice(dtype, reason)


@cache
def product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of large matrix products in `dtype` on a device, as measured by the first call of a process: some 20 ms;
    of bfloat16 on a processor without instructions for it, some 100 ms."""
    name = str(dtype).removeprefix("torch.")
    if device.type == "cpu":
        return gemm_rate(name, size=SMALL_PRODUCT, seconds=0.02)
    return gemm_rate(name, str(device), seconds=0.05)


def speed_ratio() -> float:
    """How many times as fast as float32 products those in bfloat16 are on one core: at `SIZES`³, the sum of the three
    that a linear layer takes, x Wᵀ forward, g W and gᵀ x backward, each the best of `REPEATS`."""
    ratio = 1.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of a busy machine wait for one another, whatever they multiply
    try:
        for size in SIZES:
            ratio = _seconds(torch.float32, size) / _seconds(torch.bfloat16, size)
            if not 1 / DECISIVE < ratio < DECISIVE:
                break
    finally:
        torch.set_num_threads(threads)
    return ratio


def _seconds(dtype: torch.dtype, size: int) -> float:
    """The CPU seconds of the products of a linear layer in `dtype`."""
    x = torch.linspace(-1, 1, size * size).view(size, size).to(dtype)
    w = x.flip(0)
    products: tuple[Callable[[], Tensor], ...] = (lambda: x @ w.t(), lambda: x @ w, lambda: x.t() @ w)
    return sum(map(_best, products))


def _best(product: Callable[[], Tensor]) -> float:
    """The least CPU seconds of several calls of this thread."""
    product()  # code is generated for its shapes
    least = float("inf")
    for _ in range(REPEATS):
        began = time.thread_time()
        product()
        least = min(least, time.thread_time() - began)
    return least


def device_kind(device: str) -> str:
    """What computes on a device, as far as the choice depends on it: the name of the GPU; or that of the processor,
    with the instructions that torch uses on it."""
    kind = resolve_device(device)
    if kind.type != "cpu":
        return torch.cuda.get_device_name(kind)
    return f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}"
