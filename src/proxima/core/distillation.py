"""Distillation: how far the student's distribution of the next token, π, is from a teacher's, τ, at every token.

    reverse_kl   KL(π‖τ)      the student avoids what the teacher would not say; with top K exact where K is large
    forward_kl   KL(τ‖π)      the student covers all that the teacher might say
    js           β KL(τ‖m) + (1 − β) KL(π‖m),  m = β τ + (1 − β) π

From the top K: each of K tokens is a bucket and all others together are one more, under both policies. The divergence
of these coarser distributions is a true divergence and a lower bound of that over the vocabulary, to which it rises as
K grows; the gradient, through the student's log-probs, is exact. `top_k=0`: an estimate r f(u) from the sampled token
alone, with u = τ/π and r = π/π_prox, and its gradient as a policy gradient with a detached weight:

                 estimate / r                   weight of ∇ log π, / r
    reverse_kl   −log u                         −log u             (k1: the advantage of the token is log u)
    forward_kl   u log u − u + 1                1 − u              (k3's gradient)
    js           β u log(u/m) − (1 − β) log m   −(1 − β) log m     m = β u + 1 − β

If π_prox sampled the token, both are unbiased: for the divergence at this prefix, and for its gradient. Neither
includes the effect of a token on later prefixes. k1 as a loss, differentiated, would have an expected gradient of 0;
k2's gradient is that of `reverse_kl`; k3, the unbiased estimate of the *reverse* KL, differentiated gives that of
`forward_kl`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from proxima.core.divergence import REST_FLOOR
from proxima.core.loss import Aggregate, Loss, Surrogate, TokenLoss, check_needs
from proxima.core.metrics import Metrics, SumCount
from proxima.core.ratio import LOG_RATIO_LIMIT, masked_ratio
from proxima.core.spec import Spec
from proxima.data import require
from proxima.data.field_checks import check_choices
from proxima.data.policy_batch import PolicyBatch

LOG_FLOOR = -100.0  # nats: used as the log of a probability of 0, which keeps every divergence finite


class Distillation(Spec, Protocol):
    """[N] divergence of the student from the teacher, nats, with gradient through the student, 0 outside the loss.

    top_k: the number of tokens with their own bucket; 0: the estimate from the sampled token.
    top_k_of: the model whose most probable tokens these are: the teacher, or the student as the engine sampled it.
    """

    @property
    def top_k(self) -> int: ...

    @property
    def top_k_of(self) -> Literal["teacher", "student"]: ...

    def __call__(self, b: PolicyBatch) -> Tensor: ...


@dataclass(frozen=True)
class _TeacherDivergence(Distillation):
    top_k: int = 16
    top_k_of: Literal["teacher", "student"] = "teacher"

    needs: ClassVar[frozenset[str]] = frozenset({"bucket_log_prob", "teacher_bucket_log_prob"})
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {"sampled": {"top_k": 0}}

    def __post_init__(self) -> None:
        require(self.top_k >= 0, "top_k", self.top_k, "must be >= 0; 0 estimates from the sampled token")
        check_choices(self)
        bound = "must be teacher with top_k=0, which reads the sampled token alone"
        require(self.top_k > 0 or self.top_k_of == "teacher", "top_k_of", self.top_k_of, bound)
        if self.top_k == 0:
            object.__setattr__(self, "needs", frozenset({"proximal_log_prob", "teacher_log_prob"}))

    def __call__(self, b: PolicyBatch) -> Tensor:
        """[N] divergence, nats, with gradient, 0 outside the loss."""
        if self.top_k:
            return torch.where(b.loss_mask, self.of_buckets(*buckets(b)).to(b.log_prob.dtype), 0.0)
        log_prob = b.masked("log_prob")
        log_u = (b.masked("teacher_log_prob") - log_prob.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        value, weight = self.estimate(log_u)
        return masked_ratio(b).detach() * (value + weight * (log_prob - log_prob.detach()))

    def of_buckets(self, student: Tensor, teacher: Tensor) -> Tensor:
        """[N] the divergence, from the log-probs of all buckets, [N, K+1]."""
        raise NotImplementedError

    def estimate(self, log_u: Tensor) -> tuple[Tensor, Tensor]:
        """[N] estimate and weight of ∇ log π, at ratio 1, from log τ − log π of the sampled token."""
        raise NotImplementedError


@dataclass(frozen=True)
class ReverseKl(_TeacherDivergence):
    """KL(student ‖ teacher): the student gives up what the teacher would not say, and keeps to its likeliest answers.

        D_t = Σ_b π_b (log π_b − log τ_b)        b: the K tokens, and all others as one
        top_k = 0:  r_t (log π_t − log τ_t)      gradient r_t (log π_t − log τ_t) ∇ log π_t

    Args:
        top_k: K, the number of tokens with their own bucket, >= 0; 0: the estimate from the sampled token.
        top_k_of: the model whose K most probable tokens are used: the `teacher`, or the `student` as the engine sampled
            it.
        b: `bucket_log_prob` [N, K] with gradient and `teacher_bucket_log_prob` [N, K], nats; for top_k 0 `log_prob` [N]
            with gradient, `teacher_log_prob` and `proximal_log_prob` [N]; all at the sampling temperature.
    Returns: [N] nats, with gradient, 0 outside the loss.
    Edge cases: K = vocabulary is the exact divergence; K = 1 that of "this token or another". A log-prob below −100
        counts as −100, all others together have at least 1e-8. Sampled log-ratios are clamped at ±20; they may be < 0.
    Source: MiniLLM, arXiv 2306.08543; Agarwal et al., arXiv 2306.13649 (GKD, its limit β → 1); as an advantage: Lu,
        "On-Policy Distillation", Thinking Machines, 2025.
    Differs: TRL sums over the vocabulary and divides by the tokens of a micro-batch (T21).
    Name: Reverse KL.
    Use it: for a student on its own samples, as a dense reward per token; `top_k: 0` is that of Thinking Machines.
    Not: to learn answers that the student never samples; `forward_kl` on the teacher's text does that.
    In TRL: `GKDTrainer(beta=1)`, over the vocabulary.
    In prime-rl: `orchestrator.algo.type: opd` with a `teacher`, or `opsd`, where the policy with a demonstration is the
        teacher; of the sampled token alone, as with `top_k: 0`, without tokens that fell by .2 below the engine's.
    """

    def of_buckets(self, student: Tensor, teacher: Tensor) -> Tensor:
        return _kl(student, teacher)

    def estimate(self, log_u: Tensor) -> tuple[Tensor, Tensor]:
        return -log_u, -log_u


@dataclass(frozen=True)
class ForwardKl(_TeacherDivergence):
    """KL(teacher ‖ student): the student gives some probability to everything that the teacher might say.

        D_t = Σ_b τ_b (log τ_b − log π_b)        b: the K tokens, and all others as one
        top_k = 0:  r_t (u log u − u + 1),  u = τ_t/π_t      gradient r_t (1 − u) ∇ log π_t

    Args, Returns, Edge cases: as `ReverseKl`; the sampled estimate is never negative.
    Source: Hinton et al., arXiv 1503.02531; GKD, arXiv 2306.13649 (its limit β → 0). Differs: as `ReverseKl` (T21).
    Name: Forward KL.
    Use it: to keep the teacher's variety; with the teacher's own text it is supervised distillation.
    Not: with top_k 0 far from the teacher: u has a heavy tail.
    In TRL: `GKDTrainer(beta=0)`, over the vocabulary.
    """

    def of_buckets(self, student: Tensor, teacher: Tensor) -> Tensor:
        return _kl(teacher, student)

    def estimate(self, log_u: Tensor) -> tuple[Tensor, Tensor]:
        below = -torch.expm1(log_u)  # 1 − u
        return log_u.exp() * log_u + below, below


@dataclass(frozen=True)
class JensenShannon(_TeacherDivergence):
    """Generalised Jensen–Shannon divergence: between the two KLs, and bounded.

        D_t = β KL(τ‖m) + (1 − β) KL(π‖m)        m = β τ + (1 − β) π, over the buckets
        top_k = 0:  r_t (β u log(u/m) − (1 − β) log m),  m = β u + 1 − β      gradient −r_t (1 − β) log m ∇ log π_t

    β is the teacher's share of the mixture, as in the paper: D/β → `forward_kl` as β → 0, D/(1 − β) → `reverse_kl` as
    β → 1. D itself goes to 0 at both ends, so that a small or large β needs a larger coefficient.
    Args:
        beta: β, in (0, 1).
        top_k, top_k_of, b: as `ReverseKl`.
    Returns, Edge cases: as `ReverseKl`; the sampled estimate is never negative.
    Source: GKD, arXiv 2306.13649, section 2. Differs: TRL's mixture and weights are the same for β inside (0, 1), but
        its β = 0 and 1 are the KLs themselves, not the limit 0 (T21); here these are separate kinds.
    Name: Generalised Jensen–Shannon divergence.
    Use it: as a middle way; its gradient stays bounded where teacher and student exclude each other's tokens.
    Not: to compare runs of different β by the size of the divergence.
    In TRL: `GKDTrainer(beta=…)`, over the vocabulary.
    """

    beta: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        bound = "must be in (0, 1); its limits are the kinds forward_kl (0) and reverse_kl (1)"
        require(0 < self.beta < 1, "beta", self.beta, bound)

    def of_buckets(self, student: Tensor, teacher: Tensor) -> Tensor:
        mixture = torch.logaddexp(teacher + math.log(self.beta), student + math.log1p(-self.beta))
        return self.beta * _kl(teacher, mixture) + (1 - self.beta) * _kl(student, mixture)

    def estimate(self, log_u: Tensor) -> tuple[Tensor, Tensor]:
        student = torch.full_like(log_u, math.log1p(-self.beta))
        log_m = torch.logaddexp(log_u + math.log(self.beta), student)
        weight = -(1 - self.beta) * log_m
        return self.beta * log_u.exp() * (log_u - log_m) + weight, weight


@dataclass(frozen=True)
class NoPolicyGradient(Surrogate):
    """A TokenLoss with loss and gradient 0: rewards are only measured, the teacher trains. b: `log_prob` [N]."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        return TokenLoss(0 * b.masked("log_prob"), b.loss_mask, {})


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(1)


def buckets(b: PolicyBatch) -> tuple[Tensor, Tensor]:
    """[N, K+1] log-probs, float64, of the K tokens and of all others together, under student (with gradient) and
    teacher; at least −100, and log 1e-8 for the others. Values outside the loss are meaningless."""
    assert b.bucket_log_prob is not None and b.teacher_bucket_log_prob is not None
    out = []
    for log_prob in (b.bucket_log_prob, b.teacher_bucket_log_prob):
        unread = -math.log(2 * max(1, log_prob.shape[1]))
        inside = torch.where(b.loss_mask[:, None], log_prob.double(), unread).clamp(min=LOG_FLOOR)
        rest = (1 - inside.exp().sum(1, keepdim=True)).clamp(min=REST_FLOOR)
        out.append(torch.cat([inside, rest.log()], 1))
    return out[0], out[1]


def distillation_loss(
    b: PolicyBatch, *, divergence: Distillation, aggregate: Aggregate, coefficient: float = 1.0
) -> Loss:
    """coefficient · divergence, aggregated but not yet divided, with its own denominator.

    Args: b: the batch; divergence: a spec of `DISTILLATIONS`; aggregate: of `AGGREGATES`; coefficient: >= 0.
    Returns: `Loss`. Metrics, means over the loss tokens without the coefficient: `distillation/divergence`; with
        `teacher_log_prob` also `distillation/sampled_reverse_kl`, log π − log τ of the token; from the top K
        `distillation/student_rest` and `distillation/teacher_rest`, the probability of all other tokens.
    Raises: NoFieldError (a ValueError) if the batch lacks a tensor that the divergence reads.
    Edge cases: without a loss token, numerator and denominator are 0.
    """
    check_needs(divergence, b)
    value = divergence(b)
    metrics: Metrics = {"distillation/divergence": SumCount.over(value, b.loss_mask)}
    if b.teacher_log_prob is not None:
        gap = b.masked("log_prob") - b.masked("teacher_log_prob")
        metrics["distillation/sampled_reverse_kl"] = SumCount.over(gap, b.loss_mask)
    if divergence.top_k:
        with torch.no_grad():
            for name, log_prob in zip(("student", "teacher"), buckets(b), strict=True):
                metrics[f"distillation/{name}_rest"] = SumCount.over(log_prob[:, -1].exp(), b.loss_mask)
    denominator = aggregate.denominator(b.loss_mask, b.cu_seqlens)
    return Loss(aggregate(coefficient * value, b), denominator, metrics)
