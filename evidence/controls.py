"""Surrogates that only a comparison needs."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from proxima.core.divergence import divergence
from proxima.core.surrogate.cppo import Cppo
from proxima.data.policy_batch import PolicyBatch


@dataclass(frozen=True)
class ReversedCppo(Cppo):
    """CPPO whose weights rise: w_t = w_min + (1 - w_min)(t - 1)/(T - 1), so that late tokens are bounded more tightly.

    Everything else is CPPO's. If only tight *early* bounds help, this helps less.
    """

    @torch.no_grad()
    def prefixes(self, b: PolicyBatch) -> tuple[Tensor, Tensor, Tensor]:
        assert b.sampled is not None
        far = divergence(b, self.divergence, self.centre)
        weighted, spent, granted = (torch.zeros_like(far) for _ in range(3))
        for start, end in pairwise(b.cu_seqlens.tolist()):
            at = start + b.sampled[start:end].nonzero().flatten()
            if len(at) == 0:
                continue
            weight = torch.linspace(self.w_min, 1, len(at), dtype=far.dtype)
            weighted[at] = weight * far[at]
            spent[at] = weighted[at].cumsum(0) - weighted[at]
            budget: Tensor | float = self.delta_b
            if self.budget == "dynamic":
                budget = far[at].quantile(0.9).clamp(self.delta_b, 2 * self.delta_b)
            granted[at[1:]] = budget * (weight.cumsum(0) - weight)[1:]  # the first token has no prefix: no inf · 0
        return weighted, spent, granted
