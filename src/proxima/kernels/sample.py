"""One token a row from bf16 logits, by `sample.cpp`."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from proxima.kernels.compiled import PRODUCTS, library, unavailable

Draw = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@cache
def sample_kernel() -> Draw | None:
    """draw(logits [n, V] bf16, temperature [n], uniform [n]) gives tokens [n] int64 and their log-probs [n] float32, as
    `sampler.sample_tokens` without truncation; V is a multiple of 32. The cumulative sums are float64. None where the
    machine has no kernels."""
    if unavailable(PRODUCTS):
        return None
    function = library(Path(__file__).with_suffix(".cpp")).sample
    function.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_long, ctypes.c_long, ctypes.c_int]

    def draw(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        tokens, log_probs = torch.empty(len(logits), dtype=torch.long), torch.empty(len(logits))
        tensors = logits, temperature.float().contiguous(), uniform.contiguous(), tokens, log_probs
        function(*(tensor.data_ptr() for tensor in tensors), *logits.shape, torch.get_num_threads())
        return tokens, log_probs

    return draw
