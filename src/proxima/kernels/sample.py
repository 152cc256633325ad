"""Samples one token per row from bf16 logits, by `sample.cpp`."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from proxima.kernels.compiled import PRODUCTS, functions, library, unavailable

Draw = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@cache
def sample_kernel() -> Draw | None:
    """draw(logits [n, V] bf16, temperature [n], uniform [n]) returns tokens [n] int64 and their log-probs [n] float32,
    as `sampler.sample_tokens` without truncation; V is a multiple of 32. The cumulative sums are float64. None if the
    machine has no kernels."""
    if unavailable(PRODUCTS):
        return None
    sample = functions(library(Path(__file__).with_suffix(".cpp")), {"sample": "pppppnn"})["sample"]

    def draw(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        tokens, log_probs = torch.empty(len(logits), dtype=torch.long), torch.empty(len(logits))
        sample(logits, temperature.float().contiguous(), uniform.contiguous(), tokens, log_probs, *logits.shape)
        return tokens, log_probs

    return draw
