"""Surrogates that weight a token, by a bounded function of the ratio, instead of dropping it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from proxima.core.band import Band
from proxima.core.loss import Surrogate, TokenLoss
from proxima.core.metrics import Metrics, SumCount
from proxima.core.ratio import (
    LOG_RATIO_LIMIT,
    Level,
    either,
    masked_log_ratio,
    masked_ratio,
    sequence_advantage,
    spread,
)
from proxima.core.segment import segment_mean, segment_sum
from proxima.data import require
from proxima.data.field_checks import check_choices
from proxima.data.policy_batch import PolicyBatch

MIN_LOG_WEIGHT = -18.420680743952367  # log 1e-8, the lower clamp of a sequence's log weight


@dataclass(frozen=True)
class Cispo(Surrogate):
    """Weight every token by its clipped ratio; a clipped token keeps a gradient.

        loss_t = -A sg(clip(r, 1 - epsilon_low, 1 + epsilon_high)) log pi        r = pi / pi_prox

    Args:
        epsilon_low: >= 0; at 1 or above there is no lower bound, as in the paper (verl recommends 10).
        epsilon_high: >= 0, inf allowed.
        level: `token`, or `sequence`: r is the geometric mean over the sequence.
        b: as for `PpoClip`.
    Returns: TokenLoss of unit `level`; `keep` [N] bool, False where the weight is clipped, although the token has a
        gradient. Metric `weight_mean`.
    Edge cases: r = 1 everywhere is `reinforce`. A = 0: loss and gradient 0.
    Source: MiniMax-M1, arXiv 2506.13585. verl `cispo` (both bounds).
    Differs: TRL has no lower bound, and its `epsilon_high` is the cap itself (T2): its 5.0 is 4.0 here.
    """

    epsilon_low: float = 1.0
    epsilon_high: float = 4.0
    level: Level = "token"
    zero_advantage_inert: ClassVar[bool] = True
    unbounded: ClassVar[Mapping[str, Any]] = {"epsilon_high": float("inf")}
    exempt_laws: ClassVar[frozenset[str]] = frozenset({"derivative"})  # the weight is detached
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "both": {"epsilon_low": 0.2, "epsilon_high": 0.28},
        "sequence": {"level": "sequence", "epsilon_high": 0.1},
    }

    def __post_init__(self) -> None:
        require(self.epsilon_low >= 0, "epsilon_low", self.epsilon_low, "must be >= 0; 1 or more is not a lower bound")
        bound = "must be >= -1; the cap is 1 + epsilon_high"
        require(self.epsilon_high >= -1, "epsilon_high", self.epsilon_high, bound)
        check_choices(self)

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        ratio = masked_ratio(b, self.level).detach()
        weight = ratio.clamp(min=1 - self.epsilon_low).clamp(max=1 + self.epsilon_high)
        loss = -b.masked("advantage") * weight * b.masked("log_prob")
        metrics: Metrics = {"weight_mean": SumCount.over(weight, b.loss_mask)}
        return TokenLoss(loss, b.loss_mask & (weight == ratio), metrics, self.level)

    def band(self, b: PolicyBatch) -> Band:
        lower = 1 - self.epsilon_low
        upper = 1 + self.epsilon_high
        return Band.of(
            b,
            "ratio π/π_prox and the range of its weight",
            "ratio",
            masked_ratio(b, self.level),
            lower=lower,
            upper=upper,
            columns={"lower": lower, "upper": upper},
            verdict="clipped",
            cause=lambda token: ", which is its weight: it still has a gradient",
        )


@dataclass(frozen=True)
class Sapo(Surrogate):
    """A smooth gate instead of the clip: the gradient decays as the ratio leaves 1, on either side.

        loss_t = -A (4 / tau) sigmoid(tau (r - 1))        tau = tau_positive if A > 0 else tau_negative
        gradient weight: r sech^2(tau (r - 1) / 2)

    Args:
        tau_positive, tau_negative: sharpness of the gate, > 0; larger values keep the ratio closer to 1.
        level: `token`, or `sequence`: r is the geometric mean, and A the mean advantage, over the sequence.
        b: as for `PpoClip`.
    Returns: TokenLoss of unit `level`; `keep` is the loss mask.
    Edge cases: A = 0: loss and gradient 0. At r = 1 the gradient is that of `reinforce`.
    Source: arXiv 2511.20347. verl, TRL, AReaL `sapo`.
    Differs: verl ignores the requested aggregation (P6); TRL rounds tau to float32 (T6); AReaL doesn't clamp the
        log-ratio (A6).
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05
    level: Level = "token"
    zero_advantage_inert: ClassVar[bool] = True
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {"sequence": {"level": "sequence"}}

    def __post_init__(self) -> None:
        require(0 < self.tau_positive < float("inf"), "tau_positive", self.tau_positive, "must be > 0 and finite")
        require(0 < self.tau_negative < float("inf"), "tau_negative", self.tau_negative, "must be > 0 and finite")
        check_choices(self)

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        advantage, tau = self.sharpness(b)
        gate = torch.sigmoid(tau * (masked_ratio(b, self.level) - 1))
        return TokenLoss(-advantage * 4 / tau * gate, b.loss_mask, {}, self.level)

    def sharpness(self, b: PolicyBatch) -> tuple[Tensor, Tensor]:
        """A and tau, [N] each."""
        if self.level == "token":
            advantage = b.masked("advantage")
        else:
            advantage = sequence_advantage(b)
        return advantage, either(advantage > 0, self.tau_positive, self.tau_negative, advantage)

    def band(self, b: PolicyBatch) -> Band:
        _, tau = self.sharpness(b)
        ratio = masked_ratio(b, self.level)
        gate = ratio / (tau * (ratio - 1) / 2).cosh().square()
        title = "ratio π/π_prox and the weight of its gradient"
        return Band.of(b, title, "ratio", ratio, columns={"gate": gate})


@dataclass(frozen=True)
class Vespo(Surrogate):
    """Weight every sequence by a gamma-shaped function of its importance weight, small for very large and very small
    ones.

        w = prod_t r_t        phi(w) = exp(lambda + k log w - lambda w), detached        loss_t = -phi(w) A log pi
        k, lambda: the positive pair where A >= 0, the negative pair where A < 0

    Args:
        k_positive, lambda_positive, k_negative, lambda_negative: shape, all >= 0; phi peaks at w = k / lambda,
            phi(1) = 1.
        b: as for `PpoClip`.
    Returns: TokenLoss of unit "sequence"; `keep` is the loss mask. Metric `weight_mean`, of phi over loss tokens.
    Edge cases: each token's log-ratio is clamped to +-20 and log w to [log 1e-8, 20]. w = 1 is `reinforce`.
    Source: arXiv 2602.10693; TRL `loss_type: vespo`. Differs: TRL multiplies its sampler correction into w, summed
        without the mask (T7); here a correction multiplies the loss, as for every surrogate.
    """

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0
    zero_advantage_inert: ClassVar[bool] = True
    exempt_laws: ClassVar[frozenset[str]] = frozenset({"derivative"})  # the weight is detached

    def __post_init__(self) -> None:
        for name in ("k_positive", "lambda_positive", "k_negative", "lambda_negative"):
            require(0 <= getattr(self, name) < float("inf"), name, getattr(self, name), "must be >= 0 and finite")

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        _, phi = self.weights(b)
        loss = -phi * b.masked("advantage") * b.masked("log_prob")
        return TokenLoss(loss, b.loss_mask, {"weight_mean": SumCount.over(phi, b.loss_mask)}, "sequence")

    def weights(self, b: PolicyBatch) -> tuple[Tensor, Tensor]:
        """log w, bounded, and phi(w), [N] each, detached: of the sequence of each token."""
        log_ratio = masked_log_ratio(b).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        log_weight = spread(b, segment_sum(log_ratio, b.cu_seqlens).clamp(MIN_LOG_WEIGHT, LOG_RATIO_LIMIT))
        positive = b.masked("advantage") >= 0
        gain = either(positive, self.k_positive, self.k_negative, log_weight)
        decay = either(positive, self.lambda_positive, self.lambda_negative, log_weight)
        return log_weight, (decay + gain * log_weight - decay * log_weight.exp()).exp()

    def band(self, b: PolicyBatch) -> Band:
        log_weight, phi = self.weights(b)
        title = "importance weight of the sequence and what it becomes"
        return Band.of(b, title, "sequence_ratio", log_weight.exp(), columns={"phi": phi})


@dataclass(frozen=True)
class GeoMean(Surrogate):
    """The geometric mean of clipped token ratios, one per sequence: less sensitive to outliers than an average.

        l'_t = a min(a l_t, clip(a l_t, -epsilon_low, epsilon_high)), a = sign A
        loss = -A exp(mean_t l'_t), at every token

    Args:
        epsilon_low, epsilon_high: clip range, nats, >= 0. With `clip: directed` only `epsilon_high` has an effect.
        clip: the quantity that is clipped: `directed` a l, as the paper prints; `log_ratio` l itself, as verl and TRL
            compute, so that tokens with a negative advantage stop at -epsilon_low. Equal bounds give the same.
        b: as for `PpoClip`.
    Returns: TokenLoss of unit "sequence": the sequence's loss at each of its loss tokens, so `sequence_mean_token_mean`
        is the paper's mean over sequences; `keep` [N] bool, False where the token's log-ratio is clipped.
    Edge cases: a token with A = 0 counts as log-ratio 0; A of the sequence is the mean over its loss tokens.
    Source: GMPO, arXiv 2507.20673. verl `geo_mean`, TRL `GMPOTrainer` (T9).
    Differs: verl ignores the requested aggregation and averages over all rows, fully masked ones included (P10).
    """

    epsilon_low: float = 0.4
    epsilon_high: float = 0.4
    clip: Literal["directed", "log_ratio"] = "directed"
    zero_advantage_inert: ClassVar[bool] = True
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "log_ratio": {"epsilon_low": 0.1, "epsilon_high": 0.2, "clip": "log_ratio"}
    }

    def __post_init__(self) -> None:
        require(self.epsilon_low >= 0, "epsilon_low", self.epsilon_low, "must be >= 0 nats")
        require(self.epsilon_high >= 0, "epsilon_high", self.epsilon_high, "must be >= 0 nats")
        check_choices(self)

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        directed, far = self.directed(b)
        bounded = b.masked("advantage").sign() * directed.clamp(max=far)  # min(x, clip(x, low, high)) is min(x, high)
        mean = segment_mean(bounded, b.loss_mask, b.cu_seqlens).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        loss = -sequence_advantage(b) * spread(b, mean.exp())
        return TokenLoss(loss, b.loss_mask & (directed <= far), {}, "sequence")

    def directed(self, b: PolicyBatch) -> tuple[Tensor, Tensor]:
        """a l and its upper bound, [N] nats each."""
        sign = b.masked("advantage").sign()
        directed = sign * masked_log_ratio(b)
        low = self.epsilon_high if self.clip == "directed" else self.epsilon_low
        return directed, either(sign > 0, self.epsilon_high, low, directed)

    def band(self, b: PolicyBatch) -> Band:
        directed, far = self.directed(b)
        return Band.of(
            b,
            "log-ratio in the direction of the advantage and its bound",
            "directed_log_ratio",
            directed,
            upper=far,
            columns={"upper": far},
            verdict="clipped",
            cause=lambda token: " nats: it adds the bound to the sequence's mean, and has no gradient",
        )
