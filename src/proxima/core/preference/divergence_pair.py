"""Losses of the difference Δ between the chosen and the rejected completion: DPO and its relatives, and those of sorted
margins (alignment by optimal transport)."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from proxima.core.preference.protocol import Pairwise, PreferencePairs, Smoothed, log_ratio
from proxima.data import require
from proxima.data.field_checks import check_choices

EXPONENT_LIMIT = 80.0  # exp(80) is finite in float32


@dataclass(frozen=True)
class DivergencePair(Pairwise):
    """Losses of the difference Δ alone, where the β log Z of a general f-divergence cancels (arXiv 2309.16240).

    Args:
        divergence: it defines Δ: `reverse_kl` the log-ratio; `forward_kl` −1/u; `js` log σ(log u); `alpha`
            (u^(α−1) − 1)/(α−1), u = π/π_ref.
        alpha: the parameter of the divergence `alpha`; 1 is its limit log u, `reverse_kl`.
    """

    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self)
        read = self.divergence == "alpha" or self.alpha == DivergencePair.alpha
        require(read, "alpha", self.alpha, f"has no effect with divergence={self.divergence}; set divergence=alpha")

    def scores(self, p: PreferencePairs) -> tuple[Tensor, Tensor]:
        c, r = super().scores(p)
        return self._score(c), self._score(r)

    def _score(self, x: Tensor) -> Tensor:
        """f'(u) of the divergence at u = π/π_ref, from the log-ratio log u, 0 at u = 1."""
        if self.divergence == "forward_kl":
            return 1 - (-x).clamp(max=EXPONENT_LIMIT).exp()
        if self.divergence == "js":
            return math.log(2) + logsigmoid(x)
        if self.divergence == "alpha" and self.alpha != 1:  # at 1 the limit is log u, reverse_kl
            return torch.expm1(((self.alpha - 1) * x).clamp(max=EXPONENT_LIMIT)) / (self.alpha - 1)
        return x


def smoothed_loss(x: Tensor, flipped: float) -> Tensor:
    """−(1 − ε) log σ(x) − ε log σ(−x), ε the share of flipped labels."""
    return -(1 - flipped) * logsigmoid(x) - flipped * logsigmoid(-x)


@dataclass(frozen=True)
class Sigmoid(Smoothed, DivergencePair):
    """DPO: −(1 − ε) log σ(β Δ) − ε log σ(−β Δ).

    Source: arXiv 2305.18290, Eq. 7; cDPO; f-DPO, 2309.16240. Differs: TRL 1.16 ignores label_smoothing here (T12).
    """

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        return smoothed_loss(self.beta * (c - r), self.label_smoothing)


@dataclass(frozen=True)
class SigmoidNorm(DivergencePair):
    """−log σ(β (c/len_c − r/len_r)): `sigmoid` on log-ratios per token. Source: TRL `sigmoid_norm` (T13)."""

    by_length: ClassVar[bool] = True

    def scores(self, p: PreferencePairs) -> tuple[Tensor, Tensor]:
        c, r = super().scores(p)
        return c / p.chosen_length.clamp(min=1), r / p.rejected_length.clamp(min=1)

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        return -logsigmoid(self.beta * (c - r))


@dataclass(frozen=True)
class Ipo(SigmoidNorm):
    """(Δ̄ − 1/(2β))², Δ̄ of log-ratios per token. Source: arXiv 2310.12036, Eq. 17; the mean, per its authors (T13)."""

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        return (c - r - 1 / (2 * self.beta)).square()


@dataclass(frozen=True)
class Hinge(DivergencePair):
    """max(0, 1 − β Δ). Source: SLiC, arXiv 2305.10425; RSO. TRL `hinge` (T12)."""

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        return torch.relu(1 - self.beta * (c - r))


@dataclass(frozen=True)
class ExoPair(DivergencePair):
    """KL of (σ(β Δ), σ(−β Δ)) from (1 − ε, ε), ε > 0.

    Args:
        label_smoothing: ε, the share of flipped labels, in (0, .5).
    Source: EXO, arXiv 2402.00856, Eq. 16.
    """

    label_smoothing: float = 1e-3

    def __post_init__(self) -> None:
        require(0 < self.label_smoothing < 0.5, "label_smoothing", self.label_smoothing, "must be in (0, 0.5)")
        super().__post_init__()

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        x = self.beta * (c - r)
        right = logsigmoid(x)
        wrong = logsigmoid(-x)
        first = right - math.log1p(-self.label_smoothing)
        second = wrong - math.log(self.label_smoothing)
        return right.exp() * first + wrong.exp() * second


@dataclass(frozen=True)
class Robust(Smoothed, DivergencePair):
    """[−(1 − ε) log σ(β Δ) + ε log σ(−β Δ)] / (1 − 2ε): unbiased when a share ε of the labels is flipped. Source: arXiv
    2403.00409 (T13)."""

    label_smoothing: float = 0.1

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        x = self.beta * (c - r)
        e = self.label_smoothing
        return (-(1 - e) * logsigmoid(x) + e * logsigmoid(-x)) / (1 - 2 * e)


@dataclass(frozen=True)
class Discopop(DivergencePair):
    """A loss found by a language model: −log σ(x)(1 − m) + exp(−x) m, x = β Δ, m = σ(x / τ).

    Args:
        tau: > 0, width of the step between the two.
    Source: arXiv 2406.08414.
    """

    tau: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tau > 0, "tau", self.tau, "must be > 0")

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        x = self.beta * (c - r)
        mixed = (logsigmoid(x / self.tau) - x).clamp(max=EXPONENT_LIMIT).exp()  # exp(-x) alone overflows at x = -89
        return -logsigmoid(x) * torch.sigmoid(-x / self.tau) + mixed


@dataclass(frozen=True)
class Aot(Smoothed):
    """Smoothed `sigmoid` on sorted margins: policy margins should stochastically dominate reference margins.

        x = β (sort(log π_c − log π_r) − sort(log ref_c − log ref_r))        −(1 − ε) log σ(x) − ε log σ(−x)

    Source: arXiv 2406.05882. It sorts the batch, so micro-batches change it (T13).
    """

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
