"""Preference losses: log-probs of a chosen and a rejected completion under policy and reference → one loss per pair.

    c = log π(chosen) − log π_ref(chosen)        r = log π(rejected) − log π_ref(rejected)        Δ = c − r
    nats, summed over completion tokens

Specs are frozen dataclasses; `spec(pairs)` gives [S] losses to be averaged, `spec.metrics(pairs)` the implicit rewards
β c and β r, their margin and accuracy. A mixture is a weighted sum of specs. `completion_log_prob` computes the sums;
`Kto` takes unpaired completions. Every beta is > 0.
Source of the family: DPO, arXiv 2305.18290; TRL `DPOTrainer`. To add one: a dataclass and a line in `PREFERENCES`.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from proxima.core.metrics import Metrics, SumCount
from proxima.core.ratio import either
from proxima.core.segment import segment_count, segment_sum
from proxima.data import check_choices, check_fields, require

EXPONENT_LIMIT = 80.0  # exp(80) is finite in float32


@dataclass(frozen=True, kw_only=True)
class PreferencePairs:
    """S pairs.

    Args:
        chosen, rejected: [S] float, nats, summed log-prob of the completion under the policy, with gradient.
        reference_chosen, reference_rejected: [S] float, nats, the same under the frozen reference; zeros without one.
        chosen_length, rejected_length: [S] int, completion tokens.
    """

    chosen: Annotated[Tensor, "float S"]
    rejected: Annotated[Tensor, "float S"]
    reference_chosen: Annotated[Tensor, "float S"]
    reference_rejected: Annotated[Tensor, "float S"]
    chosen_length: Annotated[Tensor, "int S"]
    rejected_length: Annotated[Tensor, "int S"]

    def __post_init__(self) -> None:
        check_fields(self)


def completion_log_prob(
    log_prob: Tensor, mask: Tensor, cu_seqlens: Tensor, other_length: Tensor | None = None, alpha: float = 1.0
) -> Tensor:
    """[S] log-prob of each completion: the sum over its masked tokens; with gradient.

    Args:
        log_prob: [N] float, nats. mask: [N] bool, completion tokens. cu_seqlens: [S+1] int.
        other_length: [S] int, tokens of the other completion of the pair; tokens beyond the shorter one weigh `alpha`.
        alpha: in [0, 1]; 1 is DPO, 0 truncates both to the same length. LD-DPO, arXiv 2409.06411; TRL `ld_alpha`.
    """
    require(0 <= alpha <= 1, "alpha", alpha, "must be in [0, 1]")
    chosen = torch.where(mask, log_prob, 0.0)
    if other_length is not None and alpha < 1:
        count = mask.long().cumsum(0)
        starts = torch.cat([count.new_zeros(1), count])[cu_seqlens[:-1].long()]
        shared = torch.minimum(segment_count(mask, cu_seqlens), other_length)
        last = torch.repeat_interleave(starts + shared, cu_seqlens.diff(), output_size=len(mask))
        chosen = chosen * either(count <= last, 1.0, alpha, chosen)
    return segment_sum(chosen, cu_seqlens)


def wpo_weight(log_prob: Tensor, log_sum_square: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S] exp(mean over tokens of log π − log Σ_v π_v²), detached: how on-policy a completion is. Multiply the loss by
    the weights of both completions.

    Args: log_prob [N] nats; log_sum_square [N], log Σ_v π_v² at the position; mask [N] bool; cu_seqlens [S+1].
    Source: WPO, arXiv 2406.11827; TRL `use_weighting` (T17: not clamped at 1).
    """
    gap = torch.where(mask, (log_prob - log_sum_square).detach(), 0.0)
    return (segment_sum(gap, cu_seqlens) / segment_count(mask, cu_seqlens).clamp(min=1)).exp()


@dataclass(frozen=True)
class Pairwise:
    """Base of the losses of pairs.

    whole_batch: the loss of a pair depends on the other pairs of the update.
    by_length: it divides log-ratios by the completions' lengths itself.

    Args:
        beta: larger values stay closer to the reference, > 0.
        label_smoothing: ε, the share of flipped labels, in [0, .5); of the losses that have it.
    """

    beta: float = 0.1
    whole_batch: ClassVar[bool] = False
    by_length: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(0 < self.beta < math.inf, "beta", self.beta, "must be > 0 and finite")
        flipped = getattr(self, "label_smoothing", 0.0)
        require(0 <= flipped < 0.5, "label_smoothing", flipped, "must be in [0, 0.5)")

    def __call__(self, p: PreferencePairs) -> Tensor:
        """[S] loss of each pair, with gradient."""
        return self.loss(*self.scores(p))

    def denominator(self, chosen_length: Tensor) -> Tensor:
        """[] float64: what the sum of the losses is divided by, pairs; adds up over the parts of a batch. The mean over
        a part's pairs times the part's denominator is the part's numerator."""
        return chosen_length.new_full((), len(chosen_length), dtype=torch.float64)

    def scores(self, p: PreferencePairs) -> tuple[Tensor, Tensor]:
        return p.chosen - p.reference_chosen.detach(), p.rejected - p.reference_rejected.detach()

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        raise NotImplementedError

    def metrics(self, p: PreferencePairs) -> Metrics:
        """Implicit rewards β c and β r, for every loss (T18); a tie counts as wrong."""
        c, r = (self.beta * (x - y) for x, y in ((p.chosen, p.reference_chosen), (p.rejected, p.reference_rejected)))
        named = {"rewards/chosen": c, "rewards/rejected": r, "rewards/margins": c - r, "rewards/accuracies": c > r}
        return {name: SumCount.over(value, torch.ones_like(c, dtype=torch.bool)) for name, value in named.items()}


@dataclass(frozen=True)
class _Divergence(Pairwise):
    """Losses of the difference Δ alone, where the β log Z of a general f-divergence cancels (arXiv 2309.16240).

    Args:
        divergence: that defines Δ: `reverse_kl` the log-ratio; `forward_kl` −1/u; `js` log σ(log u); `alpha`
            (u^(α−1) − 1)/(α−1), u = π/π_ref.
        alpha: of the divergence `alpha`; 1 is its limit log u, `reverse_kl`.
    """

    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self)
        read = self.divergence == "alpha" or self.alpha == _Divergence.alpha
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


def _smoothed(x: Tensor, flipped: float) -> Tensor:
    """−(1 − ε) log σ(x) − ε log σ(−x), ε the share of flipped labels."""
    return -(1 - flipped) * logsigmoid(x) - flipped * logsigmoid(-x)


@dataclass(frozen=True)
class Sigmoid(_Divergence):
    """DPO: −(1 − ε) log σ(β Δ) − ε log σ(−β Δ).

    Source: arXiv 2305.18290, Eq. 7; cDPO; f-DPO, 2309.16240. Differs: TRL 1.16 ignores label_smoothing here (T12).
    """

    label_smoothing: float = 0.0

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        return _smoothed(self.beta * (c - r), self.label_smoothing)


@dataclass(frozen=True)
class SigmoidNorm(_Divergence):
    """−log σ(β (c/len_c − r/len_r)): `sigmoid` on log-ratios per token. Source: TRL `sigmoid_norm` (T13)."""

    by_length: ClassVar[bool] = True

    def scores(self, p: PreferencePairs) -> tuple[Tensor, Tensor]:
        c, r = super().scores(p)
        return c / p.chosen_length.clamp(min=1), r / p.rejected_length.clamp(min=1)

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        return -logsigmoid(self.beta * (c - r))


@dataclass(frozen=True)
class Ipo(SigmoidNorm):
    """(Δ̄ − 1/(2β))², Δ̄ of log-ratios per token. Source: arXiv 2310.12036, Eq. 17; the mean as its authors say (T13)."""

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        return (c - r - 1 / (2 * self.beta)).square()


@dataclass(frozen=True)
class Hinge(_Divergence):
    """max(0, 1 − β Δ). Source: SLiC, arXiv 2305.10425; RSO. TRL `hinge` (T12)."""

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        return torch.relu(1 - self.beta * (c - r))


@dataclass(frozen=True)
class ExoPair(_Divergence):
    """KL of (σ(β Δ), σ(−β Δ)) from (1 − ε, ε), ε > 0. Source: EXO, arXiv 2402.00856, Eq. 16."""

    label_smoothing: float = 1e-3

    def __post_init__(self) -> None:
        require(0 < self.label_smoothing < 0.5, "label_smoothing", self.label_smoothing, "must be in (0, 0.5)")
        super().__post_init__()

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        x = self.beta * (c - r)
        right, wrong = logsigmoid(x), logsigmoid(-x)
        first, second = right - math.log1p(-self.label_smoothing), wrong - math.log(self.label_smoothing)
        return right.exp() * first + wrong.exp() * second


@dataclass(frozen=True)
class NcaPair(Pairwise):
    """−log σ(β c) − ½ log σ(−β c) − ½ log σ(−β r). Source: NCA, arXiv 2402.05369."""

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        c, r = self.beta * c, self.beta * r
        return -logsigmoid(c) - 0.5 * logsigmoid(-c) - 0.5 * logsigmoid(-r)


@dataclass(frozen=True)
class Robust(_Divergence):
    """[−(1 − ε) log σ(β Δ) + ε log σ(−β Δ)] / (1 − 2ε): unbiased when a share ε of the labels is flipped. Source: arXiv
    2403.00409 (T13)."""

    label_smoothing: float = 0.1

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        x, e = self.beta * (c - r), self.label_smoothing
        return (-(1 - e) * logsigmoid(x) + e * logsigmoid(-x)) / (1 - 2 * e)


@dataclass(frozen=True)
class BcoPair(Pairwise):
    """−log σ(β c − δ) − log σ(δ − β r).

    Args:
        shift: δ, a fixed one; in the paper it is the running mean of the implicit rewards.
    Source: BCO, arXiv 2404.04656. Differs: TRL 1.16 leaves δ at 0.
    """

    shift: float = 0.0

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        return -logsigmoid(self.beta * c - self.shift) - logsigmoid(self.shift - self.beta * r)


@dataclass(frozen=True)
class SppoHard(Pairwise):
    """(c − 1/(2β))² + (r + 1/(2β))²; β multiplies no log-ratio (T13). Source: SPPO, arXiv 2405.00675, Eq. 4.7."""

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        return (c - 0.5 / self.beta).square() + (r + 0.5 / self.beta).square()


@dataclass(frozen=True)
class Aot(Pairwise):
    """Smoothed `sigmoid` on sorted margins: policy margins should stochastically dominate reference margins.

        x = β (sort(log π_c − log π_r) − sort(log ref_c − log ref_r))        −(1 − ε) log σ(x) − ε log σ(−x)

    Source: arXiv 2406.05882. It sorts the batch, so micro-batches change it (T13).
    """

    label_smoothing: float = 0.0
    whole_batch: ClassVar[bool] = True

    def __call__(self, p: PreferencePairs) -> Tensor:
        ours = (p.chosen - p.rejected).sort().values
        theirs = (p.reference_chosen - p.reference_rejected).detach().sort().values
        return self.loss(ours, theirs)

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        return _smoothed(self.beta * (c - r), self.label_smoothing)


@dataclass(frozen=True)
class AotUnpaired(Aot):
    """`aot` for completions without a partner: sort(c) against sort(r). Source: arXiv 2406.05882."""

    def __call__(self, p: PreferencePairs) -> Tensor:
        c, r = self.scores(p)
        return self.loss(c.sort().values, r.sort().values)


@dataclass(frozen=True)
class ApoZero(Pairwise):
    """1 − σ(β c) + σ(β r): raise the chosen, lower the rejected. Source: APO, arXiv 2408.06266, Eq. 7."""

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        return torch.sigmoid(-self.beta * c) + torch.sigmoid(self.beta * r)


@dataclass(frozen=True)
class ApoDown(Pairwise):
    """σ(β c) + 1 − σ(β (c − r)): lower both, the rejected more. Source: APO, arXiv 2408.06266, Eq. 8 (T13)."""

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        return torch.sigmoid(self.beta * c) + torch.sigmoid(-self.beta * (c - r))


@dataclass(frozen=True)
class Discopop(_Divergence):
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
class Sft(Pairwise):
    """Negative log-likelihood of the chosen completion, scaled so that the mean over pairs is one over tokens (T16)."""

    def __call__(self, p: PreferencePairs) -> Tensor:
        return -p.chosen * len(p.chosen) / p.chosen_length.sum().clamp(min=1)

    def denominator(self, chosen_length: Tensor) -> Tensor:
        """Tokens of the chosen completions."""
        return chosen_length.sum(dtype=torch.float64)


@dataclass(frozen=True)
class Kto:
    """Kahneman-Tversky optimisation: completions labeled good or bad, without pairs.

        good: 1 − σ(β (x − z))    bad: 1 − σ(β (z − x))        x = log π − log π_ref, z = max(0, mean KL), detached

    Args:
        beta: larger values stay closer to the reference, > 0.
        good_weight, bad_weight: of the losses of either kind, >= 0 and not both 0.
        anchor: what z is: `kl`, the formula above, or `zero`, z = 0, TRL's `apo_zero_unpaired`.
    Source: arXiv 2402.01306. TRL KTOTrainer; z comes from mismatched prompts and completions of the same batch.
    """

    beta: float = 0.1
    good_weight: float = 1.0
    bad_weight: float = 1.0
    anchor: Literal["kl", "zero"] = "kl"

    def __post_init__(self) -> None:
        require(0 < self.beta < math.inf, "beta", self.beta, "must be > 0 and finite")
        require(self.good_weight >= 0, "good_weight", self.good_weight, "must be >= 0")
        bound = "must be >= 0, and > 0 beside good_weight=0"
        require(self.bad_weight >= 0 < self.good_weight + self.bad_weight, "bad_weight", self.bad_weight, bound)
        check_choices(self)

    def __call__(self, log_prob: Tensor, reference_log_prob: Tensor, good: Tensor, kl: Tensor | float = 0.0) -> Tensor:
        """[S] loss of each completion, to be averaged.

        Args:
            log_prob: [S] float, nats, summed, with gradient. reference_log_prob: [S]. good: [S] bool.
            kl: [] or a number, mean of log π − log π_ref over mismatched completions of the step; clamped to >= 0.
        """
        x = log_prob - reference_log_prob.detach()
        zero = torch.as_tensor(kl if self.anchor == "kl" else 0.0, dtype=x.dtype, device=x.device).detach().clamp(min=0)
        weight = either(good, self.good_weight, self.bad_weight, x)
        return weight * torch.sigmoid(either(good, -self.beta, self.beta, x) * (x - zero))


PREFERENCES: dict[str, type] = {
    "aot": Aot,
    "aot_unpaired": AotUnpaired,
    "apo_down": ApoDown,
    "apo_zero": ApoZero,
    "bco_pair": BcoPair,
    "discopop": Discopop,
    "exo_pair": ExoPair,
    "hinge": Hinge,
    "ipo": Ipo,
    "nca_pair": NcaPair,
    "robust": Robust,
    "sft": Sft,
    "sigmoid": Sigmoid,
    "sigmoid_norm": SigmoidNorm,
    "sppo_hard": SppoHard,
}
