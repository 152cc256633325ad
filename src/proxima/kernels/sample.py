"""Samples one token per row from bf16 logits, by `sample.cpp`."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from proxima.kernels.compiled import PRODUCTS, functions, library, unavailable

COLUMNS = 32  # the kernel reads a row by so many logits
Draw = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@cache
def sample_kernel() -> Draw | None:
    """draw(logits [n, V] bf16, temperature [n], uniform [n]) returns tokens [n] int64 and their log-probs [n] float32,
    as `sampler.sample_tokens` without truncation. The cumulative sums are float64. None if the machine has no
    kernels."""
    if unavailable(PRODUCTS):
        return None
    sample = functions(library(Path(__file__).with_suffix(".cpp")), {"sample": "pppppnn"})["sample"]

    def draw(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        last = logits.shape[1] - 1
        if missing := -logits.shape[1] % COLUMNS:  # tokens of no probability are never drawn
            logits = F.pad(logits, (0, missing), value=-torch.inf)
        tokens, log_probs = torch.empty(len(logits), dtype=torch.long), torch.empty(len(logits))
        sample(logits, temperature.float().contiguous(), uniform.contiguous(), tokens, log_probs, *logits.shape)
        return tokens.clamp_(max=last), log_probs  # a row of NaN, which the caller finds, has no largest token

    return draw
