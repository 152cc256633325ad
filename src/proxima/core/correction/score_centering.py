"""Score centering: takes the drift out of REINFORCE on tokens that another policy sampled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from proxima.core.correction.importance import PREFIX, Importance
from proxima.core.correction.weight_statistics import safe_exp
from proxima.core.loss import Corrected, Correction, Surrogate
from proxima.core.metrics import Metrics, SumCount
from proxima.core.surrogate.clip import Reinforce
from proxima.data.policy_batch import PolicyBatch, finite_log_prob

TAIL_FLOOR = 1e-6  # minimum probability of all tokens outside the head, under either policy
ONE_WEIGHT = "with level=token, towards=current, veto=null, normalise=false and rejected=count"


@dataclass(frozen=True)
class ScoreCentering(Correction):
    """Subtract from the gradient of each token the one that the behavior policy gives on average at its position,
    whatever the reward.

        gradient of token t:  -A_t (w_t grad log pi(y_t) - sum_v mu_v w_v grad log pi(v))        v: the vocabulary
        head H: the top K that the engine reports; tail: mu proportional to pi, rho = (1 - sum_H mu) / (1 - sum_H pi)
        C_t = sum_{v in H} sg(mu_v w_v - rho w_tail pi_v) log pi_v        w_v = w(pi_v / mu_v), w_tail = w(1 / rho)
        loss_t = -A_t (w_t log pi(y_t) - C_t)

    If pi itself sampled, the subtrahend would be 0: the gradients of all tokens, weighted by their probability, add up
    to 0. Under mu they do not, and REINFORCE drifts towards mu where A > 0 and away from it where A < 0, even if no
    token is better than another.
    Args:
        rejected: `count`; it rejects nothing.
        b: `advantage` [N]; `behavior_top_k_log_prob` [N, K] and `top_k_log_prob` [N, K] with gradient, nats, of the
            same tokens, at the sampling temperature; `loss_mask` [N] bool.
    Returns: Corrected with weight 1: it adds a term to the loss, `loss_term`. Metrics: the mean of
        sum_{v in H} |mu_v - rho pi_v|, `correction/score_centering_drift`, 0 if pi = mu; and that of the probability
        outside the head, `correction/score_centering_tail`.
    Raises: ValueError with a surrogate other than `reinforce`, or beside a correction other than one `importance` at
        token level towards the current policy. Its weights are w; without it, w = 1.
    Edge cases: K = vocabulary is exact; else the tail is an approximation, which matters as much as
        `correction/score_centering_tail` says. Both tails have at least 1e-6. Unbounded weights pi / mu: C_t = 0.
        A = 0: the term is 0.
    Source: arXiv 2609.20807, Eq. 9 and 11. Differs: w_t multiplies the token's own gradient alone, not C_t, which has
        its own weights: with bounded weights their mean under mu is not 1, and a product would drift by the rest.
    """

    rejected: Literal["count"] = "count"
    needs: ClassVar[frozenset[str]] = frozenset({"advantage", "behavior_top_k_log_prob", "top_k_log_prob"})

    @torch.no_grad()
    def __call__(self, b: PolicyBatch) -> Corrected:
        coefficient, tail = self.coefficients(b)
        metrics: Metrics = {
            f"{PREFIX}score_centering_drift": SumCount.over(coefficient.abs().sum(1), b.loss_mask),
            f"{PREFIX}score_centering_tail": SumCount.over(tail, b.loss_mask),
        }
        return Corrected(b.loss_mask.to(b.log_prob.dtype), b.loss_mask, metrics)

    def loss_term(self, b: PolicyBatch, surrogate: Surrogate, corrections: Sequence[Correction]) -> Tensor:
        """[N] A_t C_t, with gradient; 0 outside the loss."""
        problem = self.conflict(surrogate, corrections)
        if problem:
            raise ValueError(f"score_centering {problem}.")
        weights = [spec for spec in corrections if isinstance(spec, Importance) and spec.apply]
        coefficient, _ = self.coefficients(b, *weights)
        log_prob = _head(b, b.top_k_log_prob)
        return b.masked("advantage") * (coefficient.to(log_prob.dtype) * log_prob).sum(1).to(b.log_prob.dtype)

    @torch.no_grad()
    def coefficients(self, b: PolicyBatch, weight: Importance | None = None) -> tuple[Tensor, Tensor]:
        """[N, K] mu_v w_v - rho w_tail pi_v of the head, and [N] the behavior policy's probability outside it, both
        float64, finite but without meaning outside the loss; `weight` gives w, None: 1."""
        pi = _head(b, b.top_k_log_prob).double()
        mu = _head(b, b.behavior_top_k_log_prob).double()
        tail_pi = _tail(pi)
        tail_mu = _tail(mu)
        of_head = mu.exp()
        of_tail = tail_mu / tail_pi
        if weight is not None:
            of_head = of_head * weight.bounded(safe_exp(pi - mu))
            of_tail = of_tail * weight.bounded(tail_pi / tail_mu)
        return of_head - of_tail * pi.exp(), tail_mu.squeeze(1)

    def conflict(self, surrogate: Surrogate | None, corrections: Sequence[Correction]) -> str | None:
        if not isinstance(surrogate, Reinforce):
            return "centers the gradient of REINFORCE; set algorithm.surrogate=reinforce, or remove the correction"
        others = [spec for spec in corrections if spec is not self]
        if all(_is_of_tokens(spec) for spec in others) and len(others) <= 1:
            return None
        return f"needs the weights of tokens that were not sampled: beside it goes at most one importance, {ONE_WEIGHT}"


def _is_of_tokens(spec: Correction) -> bool:
    """True if a token's weight depends on its own probabilities, under current and behavior policy, alone."""
    if not isinstance(spec, Importance):
        return False
    alone = spec.level == "token" and spec.towards == "current" and spec.veto is None
    return alone and spec.rejected == "count" and not spec.normalise


def _head(b: PolicyBatch, log_prob: Tensor | None) -> Tensor:
    """[N, K] by selection: uniform over the head and a tail outside the loss, where the column may hold anything."""
    assert log_prob is not None
    share = 1 / (1 + log_prob.shape[1])
    unread = torch.full((), share, dtype=log_prob.dtype, device=log_prob.device).log()
    return finite_log_prob(torch.where(b.loss_mask[:, None], log_prob, unread))


def _tail(head: Tensor) -> Tensor:
    """[N, 1] the probability outside a head of log-probs [N, K], at least `TAIL_FLOOR`."""
    return (1 - head.exp().sum(1, keepdim=True)).clamp(min=TAIL_FLOOR)
