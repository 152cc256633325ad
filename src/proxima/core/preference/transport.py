"""Losses of sorted margins: alignment by optimal transport."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from proxima.core.preference.divergence_pair import smoothed_loss
from proxima.core.preference.protocol import Pairwise, PreferencePairs, log_ratio


@dataclass(frozen=True)
class Aot(Pairwise):
    """Smoothed `sigmoid` on sorted margins: policy margins should stochastically dominate reference margins.

        x = β (sort(log π_c − log π_r) − sort(log ref_c − log ref_r))        −(1 − ε) log σ(x) − ε log σ(−x)

    Source: arXiv 2406.05882. It sorts the batch, so micro-batches change it (T13).
    """

    label_smoothing: float = 0.0
    whole_batch: ClassVar[bool] = True

    def __call__(self, p: PreferencePairs) -> Tensor:
        ours = log_ratio(p.chosen, p.rejected).sort().values
        theirs = log_ratio(p.reference_chosen, p.reference_rejected).sort().values
        return self.loss(ours, theirs)

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        return smoothed_loss(self.beta * (c - r), self.label_smoothing)


@dataclass(frozen=True)
class AotUnpaired(Aot):
    """`aot` for unpaired completions: sort(c) against sort(r). Source: arXiv 2406.05882."""

    def __call__(self, p: PreferencePairs) -> Tensor:
        c, r = self.scores(p)
        return self.loss(c.sort().values, r.sort().values)
