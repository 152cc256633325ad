"""The clipped objective, on the ratio of the token or of its sequence, the policy gradient that it bounds, and TOPR,
which caps the weight of bad sequences."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from proxima.core.band import Band
from proxima.core.loss import Surrogate, TokenLoss
from proxima.core.metrics import Metrics, SumCount
from proxima.core.ratio import LOG_RATIO_LIMIT, either, masked_log_ratio, masked_ratio, sequence_advantage, spread
from proxima.core.segment import segment_sum
from proxima.data import require
from proxima.data.field_checks import check_choices
from proxima.data.policy_batch import PolicyBatch


def check_clip(epsilon_low: float, epsilon_high: float, dual_clip: float | None = None) -> None:
    """Raise FieldError for an impossible clip range."""
    require(0 <= epsilon_low <= 1, "epsilon_low", epsilon_low, "must be in [0, 1]")
    require(epsilon_high >= 0, "epsilon_high", epsilon_high, "must be >= 0")
    require(dual_clip is None or dual_clip > 1, "dual_clip", dual_clip, "must be > 1, or none")


def clipped(
    ratio: Tensor, advantage: Tensor, mask: Tensor, low: float, high: float, dual: float | None = None
) -> tuple[Tensor, Tensor, Metrics]:
    """max(−A r, −A clip(r, 1−low, 1+high)), with the dual clip if A < 0: loss [N], keep [N], and the clipped shares."""
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    if dual is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * dual), loss)
    lower, upper = clip_bounds(ratio, advantage, low, high, dual)
    below = ratio < lower
    beyond = ratio > upper
    above = beyond & (advantage > 0)
    far = beyond & (advantage < 0)
    metrics: Metrics = {
        "clip_fraction_low": SumCount.over(below, mask),
        "clip_fraction_high": SumCount.over(above, mask),
        "clip_fraction_dual": SumCount.over(far, mask),
    }
    return loss, mask & ~(below | beyond), metrics


def clip_bounds(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None) -> tuple[Tensor, Tensor]:
    """[N] each: the bounds of the ratio on the side to which the advantage pushes it; infinite on the other side."""
    lower = either(advantage < 0, 1 - low, -math.inf, ratio)
    farthest = math.inf if dual is None else dual
    far = either(advantage < 0, farthest, math.inf, ratio)
    near = either(advantage > 0, 1 + high, math.inf, ratio)
    return lower, torch.where(advantage > 0, near, far)


def clip_band(
    b: PolicyBatch, ratio: Tensor, advantage: Tensor, title: str, low: float, high: float, dual: float | None = None
) -> Band:
    """The band of a clip of the ratio [N]."""
    lower, upper = clip_bounds(ratio, advantage, low, high, dual)

    def cause(token: int) -> str:
        if float(advantage[token]) > 0:
            return " and A > 0: the update would raise it further"
        if float(ratio[token]) > 1 + high:
            return " and A < 0: beyond the dual clip the loss is constant"
        return " and A < 0: the update would lower it further"

    def free(token: int) -> str:
        if float(advantage[token]) == 0:
            return "the advantage is 0, so it has no gradient"
        return "nothing bounds it"

    bounds = {"lower": 1 - low, "upper": 1 + high}
    if dual is not None:
        bounds["dual"] = dual
    return Band.of(b, title, "ratio", ratio, lower=lower, upper=upper, columns=bounds, cause=cause, free=free)


@dataclass(frozen=True)
class PpoClip(Surrogate):
    """Give a token no gradient once its ratio has left the clip range in the direction of its advantage.

        loss_t = max(-A r, -A clip(r, 1 - epsilon_low, 1 + epsilon_high))        r = pi / pi_prox
        with dual_clip c, if A < 0: loss_t = min(loss_t, -A c)

    Args:
        epsilon_low: how far the ratio may fall below 1; in [0, 1].
        epsilon_high: how far it may rise above 1; >= 0, inf allowed. DAPO's clip-higher: .28.
        dual_clip: bound on the ratio of tokens with a negative advantage, > 1; null: off. verl: 3, DAPO: 10.
        b: `log_prob` [N] with gradient and `proximal_log_prob` [N], nats; `advantage` [N], reward units; `loss_mask`
            [N] bool.
    Returns: TokenLoss of unit "token": `loss` [N]; `keep` [N] bool, False where a clip has removed the gradient.
        Metrics: `clip_fraction_low`, `clip_fraction_high`, `clip_fraction_dual`, shares of the loss tokens.
    Edge cases: A = 0: loss and gradient 0. r exactly at a bound: not clipped. Log-ratios beyond 20 have gradient 0.
    Source: PPO, arXiv 1707.06347, Eq. 7; GRPO 2402.03300; dual clip 1912.09729; clip-higher, DAPO 2503.14476.
    Differs: TRL does not clamp log-ratios at 20 (T4). TRL's two-sided `delta` (T3) equals `dual_clip` if delta >= 1 +
        epsilon_high: for A > 0 the clip acts first. AReaL's dual clip is for both signs, without effect if A > 0 (A4).
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    dual_clip: float | None = None
    zero_advantage_inert: ClassVar[bool] = True
    unbounded: ClassVar[Mapping[str, Any]] = {"epsilon_low": 1.0, "epsilon_high": float("inf")}
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {"dual": {"epsilon_high": 0.28, "dual_clip": 1.5}}

    def __post_init__(self) -> None:
        check_clip(self.epsilon_low, self.epsilon_high, self.dual_clip)

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        bounds = (self.epsilon_low, self.epsilon_high, self.dual_clip)
        return TokenLoss(*clipped(masked_ratio(b), b.masked("advantage"), b.loss_mask, *bounds))

    def band(self, b: PolicyBatch) -> Band:
        title = "ratio π/π_prox and its clip range"
        bounds = (self.epsilon_low, self.epsilon_high, self.dual_clip)
        return clip_band(b, masked_ratio(b), b.masked("advantage"), title, *bounds)


@dataclass(frozen=True)
class Gspo(Surrogate):
    """The clipped objective on one ratio per sequence: the geometric mean of its tokens' ratios.

        s = exp(mean_t l_t)        l = log pi - log pi_prox, over the loss tokens of the sequence
        sequence: loss_t = max(-A s, -A clip(s, 1 - epsilon_low, 1 + epsilon_high)), gradient through the mean
        token:    the same with exp(l_t - sg l_t + sg log s) for s: value and gradient s at every token

    Args:
        epsilon_low, epsilon_high: clip range of s, in [0, 1] and >= 0; two orders of magnitude narrower than PPO's,
            because s is an average.
        dual_clip: bound on s of sequences with a negative advantage, > 1; null: off.
        form: gradient through the mean (`sequence`), or of value s at every token (`token`), where A may differ by
            token. With one advantage per sequence both have the same gradient under `sequence_mean_token_mean`.
        b: as for `PpoClip`.
    Returns: TokenLoss whose unit is `form`: `loss` [N], `keep` [N] bool; in the sequence form constant in a sequence.
    Edge cases: a sequence with one loss token is `ppo_clip`. The sequence form takes the mean A over the loss tokens.
    Source: arXiv 2507.18071, Eq. 5 (sequence) and 14 (token). verl `gspo` (token form), UniRL and AReaL (sequence
        form), TRL `importance_sampling_level: sequence`.
    Differs: verl clamps log s at 10 from above only (P5), UniRL and TRL not at all (U6, T4); here +-20. AReaL's token
        mean weighs sequences by length (A5); here the aggregation decides.
    """

    epsilon_low: float = 3e-4
    epsilon_high: float = 4e-4
    form: Literal["token", "sequence"] = "token"
    dual_clip: float | None = None
    zero_advantage_inert: ClassVar[bool] = True
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "sequence": {"form": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.1},
        "wide": {"epsilon_low": 0.1, "epsilon_high": 0.1},
    }

    def __post_init__(self) -> None:
        check_clip(self.epsilon_low, self.epsilon_high, self.dual_clip)
        check_choices(self)

    @property
    def exempt_laws(self) -> frozenset[str]:  # the token form detaches the sequence's ratio
        if self.form == "token":
            return frozenset({"derivative"})
        return frozenset()

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        ratio, advantage = self.measured(b)
        bounds = (self.epsilon_low, self.epsilon_high, self.dual_clip)
        return TokenLoss(*clipped(ratio, advantage, b.loss_mask, *bounds), unit=self.form)

    def measured(self, b: PolicyBatch) -> tuple[Tensor, Tensor]:
        """[N] each: the ratio of the sequence, with the gradient of the form, and the advantage that it is for."""
        ratio = masked_ratio(b, "sequence")
        if self.form == "sequence":
            return ratio, sequence_advantage(b)
        log_ratio = masked_log_ratio(b)
        return ratio.detach() * (log_ratio - log_ratio.detach()).exp(), b.masked("advantage")

    def band(self, b: PolicyBatch) -> Band:
        ratio, advantage = self.measured(b)
        title = "geometric mean of the sequence's ratios and its clip range"
        return clip_band(b, ratio, advantage, title, self.epsilon_low, self.epsilon_high, self.dual_clip)


@dataclass(frozen=True)
class Luspo(Gspo):
    """GSPO without its length bias: each sequence's loss counts as often as it has tokens.

        loss_t = GSPO's sequence loss at every token, so under `sequence_mean_token_sum`:
        mean over sequences of n max(-A s, -A clip(s, ...))

    Args, Returns, Edge cases: as `Gspo`, in the sequence form. Use it with `aggregate: sequence_mean_token_sum`; under
        `sequence_mean_token_mean` it is `gspo`.
    Source: arXiv 2602.05261; TRL `loss_type: luspo` with `importance_sampling_level: sequence` (T1). Differs: TRL's
        luspo at token level is `ppo_clip` under `sequence_mean_token_sum`.
    """

    form: Literal["token", "sequence"] = "sequence"
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {"wide": {"epsilon_low": 0.1, "epsilon_high": 0.1}}


@dataclass(frozen=True)
class Reinforce(Surrogate):
    """The policy gradient, without any bound on the update.

        loss_t = -A log pi

    Args:
        b: `log_prob` [N] with gradient, nats; `advantage` [N], reward units; `loss_mask` [N] bool.
    Returns: TokenLoss of unit "token"; `keep` is the loss mask.
    Edge cases: A = 0: loss and gradient 0. Without a proximal policy the ratio metrics are absent.
    Source: Williams, 1992; GPG, arXiv 2504.02546 (with its own advantage). verl `gpg`, `reinforce`. Differs: no
        differences.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"advantage"})
    zero_advantage_inert: ClassVar[bool] = True

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        return TokenLoss(-b.masked("advantage") * b.masked("log_prob"), b.loss_mask, {})

    def band(self, b: PolicyBatch) -> Band:
        return Band.of(b, "no band", "", math.nan, free=lambda token: "this surrogate has no bound")


@dataclass(frozen=True)
class Topr(Surrogate):
    """Imitate good sequences with full weight, and push bad ones down only while the policy still produces them.

        w = 1 where A >= 0, else min(prod_t r_t, upper)        loss_t = -sg(w) A log pi        r = pi / pi_prox

    Args:
        upper: cap on the weight of a sequence with a negative advantage, > 0; 1 in the paper, inf allowed.
        b: as for `PpoClip`.
    Returns: TokenLoss of unit "sequence"; `keep` [N] bool, False where the cap acts (the token still has a gradient).
        Metric `weight_mean`.
    Raises: ValueError naming field, value and bound, at construction.
    Edge cases: A = 0: loss and gradient 0. r = 1 everywhere is `reinforce`. The log of the product is clamped to +-20.
    Source: arXiv 2503.14286, with a- = 0, b- = 1 and a+ = b+ = 1. Its ratio is pi / mu: ours with `proximal: behavior`.
    Differs: the paper decides by the sign of the reward; here it is that of the advantage, so the baseline decides.
    Name: TOPR, tapered off-policy REINFORCE.
    Use it: Batches are old or sampled by another model, and most completions are wrong.
    Not: Single tokens go wrong. Positive sequences have no bound at all, and all tokens of the others share one ratio.
    """

    upper: float = 1.0
    zero_advantage_inert: ClassVar[bool] = True
    exempt_laws: ClassVar[frozenset[str]] = frozenset({"derivative"})  # the weight is detached
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {"wide": {"upper": float("inf")}}

    def __post_init__(self) -> None:
        require(self.upper > 0, "upper", self.upper, "must be > 0")

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        ratio = self.ratio(b)
        advantage = b.masked("advantage")
        negative = advantage < 0
        weight = ratio.clamp(max=self.upper).where(negative, 1.0)
        keep = b.loss_mask & ~(negative & (ratio > self.upper))
        loss = -advantage * weight * b.masked("log_prob")
        return TokenLoss(loss, keep, {"weight_mean": SumCount.over(weight, b.loss_mask)}, "sequence")

    def ratio(self, b: PolicyBatch) -> Tensor:
        """prod_t r_t, [N], detached: of the sequence of each token."""
        log_weight = segment_sum(masked_log_ratio(b).detach(), b.cu_seqlens).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return spread(b, log_weight.exp())

    def band(self, b: PolicyBatch) -> Band:
        ratio = self.ratio(b)
        return Band.of(
            b,
            "ratio of the sequence and the cap of its weight",
            "sequence_ratio",
            ratio,
            upper=either(b.masked("advantage") < 0, self.upper, math.inf, ratio),
            columns={"upper": self.upper},
            verdict="clipped",
            cause=lambda token: ", which is its weight: it still has a gradient",
            free=lambda token: "A >= 0: a good sequence has weight 1, whatever its ratio is",
        )
