"""The sampling settings of each row of logits, as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from proxima.engine.protocol import Sampling


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """`Sampling` of n rows as tensors [n]: float32, and int64 for `top_k`."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, settings: Sequence[Sampling], device: torch.device) -> "SamplingRows":
        """Build one row for each of `settings`."""
        names = ("temperature", "top_k", "top_p", "min_p")
        return cls(**{name: torch.tensor([getattr(s, name) for s in settings], device=device) for name in names})

    def of_rows(self, rows: Tensor | slice) -> "SamplingRows":
        """The settings of some rows."""
        return SamplingRows(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @cached_property
    def alike(self) -> list[Tensor]:
        """Row indices grouped by truncation. Groups are drawn separately: truncation determines the sums of a draw and
        their number of tokens, and so the last bits of the log-probs."""
        settings = torch.stack([self.top_k.float(), self.top_p.float(), self.min_p.float()], dim=1)
        kinds, kind = settings.unique(dim=0, return_inverse=True)
        return [(kind == i).nonzero().squeeze(1) for i in range(len(kinds))]
