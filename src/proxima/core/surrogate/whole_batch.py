"""Surrogates that select tokens over the whole optimizer batch, and `dro`.

On a batch without `selected`, a spec selects from that batch alone. `core.precompute` selects over the whole optimizer
batch first, so that splitting it into micro-batches changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from proxima.core.band import Band
from proxima.core.loss import Surrogate, TokenLoss
from proxima.core.metrics import SumCount
from proxima.core.ratio import masked_log_ratio, masked_ratio
from proxima.core.segment import second_moment_keep, smallest_tokens, value_hash
from proxima.core.surrogate.clip import check_clip, clip_band, clipped
from proxima.data import require
from proxima.data.field_checks import check_choices
from proxima.data.policy_batch import PolicyBatch


def covariance(b: PolicyBatch) -> Tensor:
    """[N] (A − mean A)(log π − mean log π), means over the loss tokens of the batch; 0 outside the loss. Detached."""
    advantage = b.masked("advantage").double()
    log_prob = b.masked("log_prob").detach().double()
    count = b.loss_mask.sum().clamp(min=1)
    centred = (advantage - advantage.sum() / count) * (log_prob - log_prob.sum() / count)
    return torch.where(b.loss_mask, centred, 0.0)


def selected_count(share: float, b: PolicyBatch) -> Tensor:
    """[] int64, max(1, floor(share n)) of the n loss tokens."""
    return (share * b.loss_mask.sum(dtype=torch.float64)).long().clamp(min=1)


def selected(b: PolicyBatch, spec: Surrogate) -> Tensor:
    """[N] bool, `b.selected` if it was precomputed, otherwise the tokens that `spec` selects from this batch alone."""
    if b.selected is not None:
        return b.selected
    chosen = spec.select_tokens(b)
    if chosen is None:
        return torch.zeros_like(b.loss_mask)
    return chosen


@dataclass(frozen=True)
class ClipCov(Surrogate):
    """`ppo_clip` without a gradient on a few tokens with a high covariance of advantage and log-prob.

        cov_t = (A_t - mean A)(log pi_t - mean log pi)
        selected: max(1, floor(share n)) of the unclipped tokens with low < cov < high
        loss_t = 0 if selected else ppo_clip_t

    Updates on such tokens reduce the entropy most.

    Args:
        epsilon_low, epsilon_high: how far the ratio may fall below 1, in [0, 1], and rise above it, >= 0.
        share: of the n loss tokens, in [0, 1].
        low, high: eligible tokens have a covariance between these, low < high.
        b: as for `PpoClip`, and `behavior_log_prob` [N]; `selected` [N] bool if precomputed over the whole batch.
    Returns: TokenLoss of unit "token"; `keep` is False where clipped or selected. Metrics: those of `PpoClip`, and
        `selected_fraction`.
    Edge cases: share 0 still selects one eligible token, as in verl. Eligible tokens are chosen by a hash of their
        behavior log-probs and advantages, so order, split and random state of the batch have no effect.
    Source: arXiv 2505.22617. verl `clip_cov`. Differs: verl selects by torch.randperm in each micro-batch (P8).
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    share: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    needs: ClassVar[frozenset[str]] = Surrogate.needs | {"behavior_log_prob"}
    whole_batch: ClassVar[bool] = True
    # Which tokens are eligible depends on the size of their covariance; the draw, on the last bit of the values.
    exempt_laws: ClassVar[frozenset[str]] = frozenset({"float32", "on_policy", "scale"})
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {"many": {"share": 0.3, "low": 0.0}}

    def __post_init__(self) -> None:
        check_clip(self.epsilon_low, self.epsilon_high)
        require(0 <= self.share <= 1, "share", self.share, "must be in [0, 1]")
        require(self.low < self.high, "low", self.low, f"must be < high={self.high}")

    @torch.no_grad()
    def select_tokens(self, b: PolicyBatch) -> Tensor:
        _, free, _ = clipped(masked_ratio(b), b.masked("advantage"), b.loss_mask, self.epsilon_low, self.epsilon_high)
        cov = covariance(b)
        eligible = free & (cov > self.low) & (cov < self.high)
        # A hash of data, not of a forward pass, whose last bits change with the micro-batches.
        key = value_hash(b.masked("behavior_log_prob"), b.masked("advantage"))
        return smallest_tokens(key, eligible, selected_count(self.share, b))

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        bounds = (self.epsilon_low, self.epsilon_high)
        loss, keep, metrics = clipped(masked_ratio(b), b.masked("advantage"), b.loss_mask, *bounds)
        out = selected(b, self)
        loss = torch.where(out, torch.zeros((), dtype=loss.dtype, device=loss.device), loss)
        return TokenLoss(loss, keep & ~out, {**metrics, "selected_fraction": SumCount.over(out, b.loss_mask)})

    def band(self, b: PolicyBatch) -> Band:
        title = "ratio π/π_prox and its clip range"
        clip = clip_band(b, masked_ratio(b), b.masked("advantage"), title, self.epsilon_low, self.epsilon_high)
        span = f"{self.low:g} and {self.high:g}"
        words = f"selected over the whole batch, of those with a covariance of A and log π between {span}"
        return replace(clip, chosen=b.loss_mask & selected(b, self) & clip.keep, chosen_words=words)


@dataclass(frozen=True)
class KlCov(Surrogate):
    """The unclipped objective, with a pull towards the proximal policy on the tokens with the highest covariance of
    advantage and log-prob.

        loss_t = -A r + coefficient |l_t| [t selected]
        selected: the max(1, floor(share n)) largest cov_t, see `ClipCov`

    Args:
        share: of the n loss tokens, in [0, 1].
        coefficient: >= 0, reward units per nat.
        b: as for `PpoClip`; `selected` [N] bool if precomputed over the whole batch.
    Returns: TokenLoss of unit "token"; `keep` is the loss mask. Metric `selected_fraction`.
    Edge cases: at l = 0 the pull has gradient 0, so it does nothing in the first update from the proximal policy.
    Source: arXiv 2505.22617. verl `kl_cov` (P9: the pull is |l|, not a KL; its reported `ppo_kl` is mean |l|).
    """

    share: float = 2e-4
    coefficient: float = 1.0
    whole_batch: ClassVar[bool] = True
    exempt_laws: ClassVar[frozenset[str]] = frozenset({"scale"})  # the pull has no advantage in it
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {"many": {"share": 0.3, "coefficient": 0.5}}

    def __post_init__(self) -> None:
        require(0 <= self.share <= 1, "share", self.share, "must be in [0, 1]")
        require(0 <= self.coefficient < float("inf"), "coefficient", self.coefficient, "must be >= 0 and finite")

    @torch.no_grad()
    def select_tokens(self, b: PolicyBatch) -> Tensor:
        if b.behavior_log_prob is None:
            fixed = "proximal_log_prob"
        else:
            fixed = "behavior_log_prob"
        ties = value_hash(b.masked("proximal_log_prob"), b.masked(fixed), b.masked("advantage"))
        return smallest_tokens(-covariance(b), b.loss_mask, selected_count(self.share, b), ties)

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        out = selected(b, self)
        loss = torch.where(out, self.coefficient * masked_log_ratio(b).abs(), 0.0)
        loss = loss - b.masked("advantage") * masked_ratio(b)
        return TokenLoss(loss, b.loss_mask, {"selected_fraction": SumCount.over(out, b.loss_mask)})

    def band(self, b: PolicyBatch) -> Band:
        pulled = b.loss_mask & selected(b, self)

        def words(token: int) -> str:
            if bool(pulled[token]):
                size = "is among the highest of the batch, so that it is pulled towards π_prox"
                return f"no token is dropped; its covariance of A and log π {size} by {self.coefficient:g}"
            return "no token is dropped; its covariance of A and log π is not among the highest of the batch"

        title = "log-ratio, whose size is the pull on selected tokens"
        return Band.of(b, title, "log_ratio_to_proximal", masked_log_ratio(b), free=words)


@dataclass(frozen=True)
class M2po(Surrogate):
    """The unclipped objective without the tokens of the largest log-ratios, which bounds the second moment of the rest.

        selected: drop the largest (log pi - log mu)^2 until the mean over the kept tokens is < threshold
        loss_t = -A r [kept]

    Args:
        threshold: on the mean square, nats^2, > 0.
        policy: the policy compared with the behavior policy: `current`, as in the paper, or `proximal`, whose mask is
            known before the forward pass.
        b: as for `PpoClip`, and `behavior_log_prob` [N]; `selected` [N] bool (True: dropped) if precomputed over the
            whole batch.
    Returns: TokenLoss of unit "token"; `keep` [N] bool.
    Edge cases: at least one token is kept. threshold = inf keeps all. With `proximal: behavior` and `policy: proximal`
        nothing is dropped.
    Source: arXiv 2510.01161. AReaL `m2_threshold` masks by the proximal policy and clips the rest, as `ppo_clip` with
        the correction `second_moment`. Differs: AReaL's denominator excludes dropped tokens.
    """

    threshold: float = 0.04
    policy: Literal["current", "proximal"] = "current"
    needs: ClassVar[frozenset[str]] = Surrogate.needs | {"behavior_log_prob"}
    whole_batch: ClassVar[bool] = True
    unbounded: ClassVar[Mapping[str, Any]] = {"threshold": float("inf")}
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {"proximal": {"policy": "proximal", "threshold": 0.01}}

    def __post_init__(self) -> None:
        require(self.threshold > 0, "threshold", self.threshold, "must be > 0")
        check_choices(self)

    @torch.no_grad()
    def select_tokens(self, b: PolicyBatch) -> Tensor:
        return b.loss_mask & ~second_moment_keep(self.squares(b), b.loss_mask, self.threshold)

    def squares(self, b: PolicyBatch) -> Tensor:
        """[N] nats^2, the squared log-ratio of `policy` to the behavior policy."""
        name = "log_prob" if self.policy == "current" else "proximal_log_prob"
        return (b.masked(name) - b.masked("behavior_log_prob")).square()

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        keep = b.loss_mask & ~selected(b, self)
        loss = -b.masked("advantage") * masked_ratio(b)
        return TokenLoss(torch.where(keep, loss, 0.0), keep, {})

    def band(self, b: PolicyBatch) -> Band:
        squares = self.squares(b).detach()
        rest = f"the mean of the rest is below {self.threshold:g}"
        return Band.of(
            b,
            "squared log-ratio to μ, whose mean over the batch is bounded",
            "squared_log_ratio",
            squares,
            chosen=b.loss_mask & selected(b, self),
            chosen_words=f"the largest squared log-ratios of the batch are dropped until {rest}",
            free=lambda t: f"its squared log-ratio {float(squares[t]):.3g} is not among the largest of the batch",
        )


@dataclass(frozen=True)
class Dro(Surrogate):
    """Policy gradient with a quadratic pull of the log-ratio towards 0. It computes no ratio, hence no exponential.

        loss_t = -(A log pi - beta / 2 (log pi - log pi_prox)^2)

    Args:
        beta: strength of the pull, > 0, reward units per nat squared.
        b: as for `PpoClip`.
    Returns: TokenLoss of unit "token"; `keep` is the loss mask.
    Edge cases: the pull remains at A = 0, so such a token still has a gradient. The log-ratio is not clamped (P12).
    Source: direct reward optimisation, arXiv 2405.19107; Kimi k1.5, 2501.12599. verl `dro`.
    """

    beta: float = 0.5
    exempt_laws: ClassVar[frozenset[str]] = frozenset({"scale"})  # the pull has no advantage in it

    def __post_init__(self) -> None:
        require(0 < self.beta < float("inf"), "beta", self.beta, "must be > 0 and finite")

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        pull = 0.5 * self.beta * masked_log_ratio(b).square()
        return TokenLoss(pull - b.masked("advantage") * b.masked("log_prob"), b.loss_mask, {})

    def band(self, b: PolicyBatch) -> Band:
        log_ratio = masked_log_ratio(b)
        columns = {"pull": self.beta * log_ratio}
        return Band.of(b, "log-ratio and the pull on it", "log_ratio_to_proximal", log_ratio, columns=columns)
