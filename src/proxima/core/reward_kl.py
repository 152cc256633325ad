"""KL in the reward: every loss token pays for its divergence from the reference."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from proxima.core import PENALTIES
from proxima.core.advantage.token import place_scores, with_kl
from proxima.core.segment import segment_count, segment_mean, segment_sum
from proxima.data import require
from proxima.data.field_checks import check_choices
from proxima.data.policy_batch import finite_log_prob

KL = "reward_kl/mean"  # the metric: nats per token, the mean over completions of the mean over their loss tokens


@dataclass(frozen=True)
class ShapedReward:
    """The result of `RewardKl`.

    Args:
        reward: [N] float, reward units, of each token; 0 outside the loss.
        total: [S] float, reward units, the reward that an advantage of whole completions reads.
        kl: [S] float, nats per token, the mean over the loss tokens of each completion; 0 without one.
        some: [S] bool, the completion has a loss token.
        paid: [S] float, reward units, the amount that the divergence took from each completion.
    """

    reward: Tensor
    total: Tensor
    kl: Tensor
    some: Tensor
    paid: Tensor

    @property
    def mean_kl(self) -> float:
        """Nats per token, the mean of `kl` over the completions with a loss token; 0 without one. `AdaptiveCoefficient`
        compares it with its target."""
        return float(self.kl.double().sum()) / max(1, int(self.some.sum()))


@dataclass(frozen=True)
class AdaptiveCoefficient:
    """Adapts the coefficient to keep the KL near a target.

        beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) min(n / horizon, 1))        n: of the step

    Args:
        target: nats per token, > 0, the mean over completions of the mean over their loss tokens.
        horizon: completions over which a persistent error of 20 % multiplies beta by 1.2, > 0.
    Source: arXiv 1909.08593. verl `AdaptiveKLController`. Stateless: the caller keeps beta.
    Differs: the target of the paper and of TRL's former PPO is for a whole completion, a sum over tokens. There and in
        verl n / horizon is unbounded (P23): a step of more than a horizon moves beta by more than 20 %, and one of more
        than 5 horizons turns it negative, a reward for divergence; here no step moves it by more than 20 %.
    """

    target: float = 0.1
    horizon: float = 10000.0

    def __post_init__(self) -> None:
        require(self.target > 0, "target", self.target, "must be > 0 nats")
        require(self.horizon > 0, "horizon", self.horizon, "must be > 0 samples")

    def next(self, coefficient: float, kl: float, samples: int) -> float:
        """The coefficient for the next step, after one of `samples` completions with mean KL `kl`, nats."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return coefficient * (1 + error * min(samples / self.horizon, 1.0))


@dataclass(frozen=True)
class RewardKl:
    """KL to the frozen reference in the reward of each token, in addition to the score on the last one.

        r_t = [t is the last loss token] score - beta k_t        k_t estimates KL(pi_old || pi_ref), at loss tokens

    pi_old is the policy that the update starts from: the proximal log-probs under `proximal: recompute`, otherwise the
    behavior log-probs. So k_t is a constant in the update. A per-token advantage gets r_t. One of whole completions,
    such as `grpo`, gets the sum, score - beta sum_t k_t, and its group baseline is the mean of such sums: a long
    completion pays for more tokens. `reference_kl` is the alternative, a KL in the loss, with its own gradient.

    Args:
        coefficient: beta, reward units per nat, >= 0; the initial value if adaptive. 0 only measures.
        estimator: k1 (d = log pi_old - log pi_ref, unbiased), k2 (d^2 / 2), k3 (exp(-d) - 1 + d, >= 0) or abs (|d|).
        limit: for k3, which is clamped to +-limit nats; inf: no clamp. verl has 10.
        adaptive: adapts beta after each step to keep the KL near a target; null: beta is fixed.
        score: [S] float, reward units, of each completion.
        log_prob, reference_log_prob: [N] nats; any value outside the loss.
        loss_mask: [N] bool; cu_seqlens: [S+1] int.
    Returns: `ShapedReward`.
    Raises: ValueError naming field, value and bound, at construction.
    Edge cases: a completion without a loss token keeps its score as `total`, and none of its tokens has a reward. d is
        clamped to +-20 in k3.
    Source: arXiv 1909.08593, Eq. 2; InstructGPT, 2203.02155, Eq. 2. verl `apply_kl_penalty`, TRL PPOTrainer, AReaL.
    Differs: verl's k3 is always clamped at 10 (P22); TRL adds the score to the token after the last one (T20).
    """

    coefficient: float = 0.05
    estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    adaptive: AdaptiveCoefficient | None = None
    limit: float = float("inf")

    def __post_init__(self) -> None:
        check_choices(self)
        require(0 <= self.coefficient < float("inf"), "coefficient", self.coefficient, "must be >= 0 and finite")
        require(self.limit > 0, "limit", self.limit, "must be > 0")
        of_k3 = self.estimator == "k3" or self.limit == float("inf")
        require(of_k3, "limit", self.limit, "must be inf: only k3 has one", remedy="set estimator=k3")
        moves = self.coefficient > 0 or self.adaptive is None
        require(moves, "coefficient", self.coefficient, "must be > 0 if adaptive is set, which multiplies it")

    @torch.no_grad()
    def __call__(
        self, score: Tensor, log_prob: Tensor, reference_log_prob: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
    ) -> ShapedReward:
        ours = finite_log_prob(torch.where(loss_mask, log_prob, 0.0))
        reference = finite_log_prob(torch.where(loss_mask, reference_log_prob, 0.0))

        settings = {"limit": self.limit} if self.estimator == "k3" else {}
        spec = PENALTIES[self.estimator](**settings)
        kl = spec.divergence(ours, reference)
        paid = (self.coefficient * segment_sum(kl, cu_seqlens)).to(score.dtype)
        placed = place_scores(score, loss_mask, cu_seqlens)
        return ShapedReward(
            reward=with_kl(placed, kl, loss_mask, self.coefficient),
            total=score - paid,
            kl=segment_mean(kl, loss_mask, cu_seqlens),
            some=segment_count(loss_mask, cu_seqlens) > 0,
            paid=paid,
        )

    def after(self, kl: float, samples: int) -> "RewardKl":
        """Return the spec for the step after one of `samples` completions with a mean KL of `kl`, nats per token."""
        if self.adaptive is None:
            return self
        return replace(self, coefficient=self.adaptive.next(self.coefficient, kl, samples))
