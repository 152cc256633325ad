"""Laws of distillation: a divergence between two distributions, and its estimate from the sampled token."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxima.core import TokenSum
from proxima.core.distillation import buckets, distillation_loss
from proxima.data.policy_batch import PolicyBatch
from proxima.laws.batches import BATCHES, BatchCase
from proxima.laws.first_laws import FINITE, MASKED, ORDINARY, runs_law, tensor_runs
from proxima.laws.law import Law, require_close, require_that
from proxima.laws.needs_law import needs_laws
from proxima.laws.surrogate_laws import STEP, extreme_law

WORDS = 6  # in the vocabulary over which expectations are exact sums


def value_law(spec: Any, case: BatchCase) -> None:
    """The value is [N], finite, and 0 outside the loss; from the top K it is at least 0, up to rounding."""
    b = case.batch
    value = spec(b)
    require_that(value.shape == b.log_prob.shape, f"shape {list(value.shape)}, expected [{len(b)}]")
    require_that(bool((value[~b.loss_mask] == 0).all()), "it is not 0 outside the loss mask")
    require_that(bool(value.isfinite().all()), "it is not finite")
    require_that(not spec.top_k or bool((value >= -1e-7).all()), "a divergence is negative")
    gradient = _gradient(spec, b)
    require_that(bool(gradient.isfinite().all()), "the gradient is not finite")
    require_that(bool((gradient[~b.loss_mask] == 0).all()), "the gradient is not 0 outside the loss mask")


def _gradient(spec: Any, b: PolicyBatch) -> Tensor:
    name = "bucket_log_prob" if spec.top_k else "log_prob"
    leaf: Tensor = getattr(b, name).detach().clone().requires_grad_()
    value = spec(replace(b, **{name: leaf})).sum() + 0 * leaf.nan_to_num().sum()
    return torch.autograd.grad(value, leaf)[0]


def zero_where_equal(spec: Any, case: BatchCase) -> None:
    """For a student equal to its teacher, value and gradient are 0."""
    b = case.batch
    student = replace(b, teacher_log_prob=b.log_prob.detach(), teacher_bucket_log_prob=b.bucket_log_prob)
    require_close(spec(student).detach(), torch.zeros_like(b.log_prob).detach(), "divergence from itself")
    gradient = _gradient(spec, student)
    require_close(gradient, torch.zeros_like(gradient), "gradient at the teacher")


def bucket_derivative(spec: Any, case: BatchCase) -> None:
    """From the top K, the gradient is the derivative of the value."""
    b, gradient = case.batch, _gradient(spec, case.batch)
    assert b.bucket_log_prob is not None
    for column in range(b.bucket_log_prob.shape[1]):
        shift = torch.zeros_like(b.bucket_log_prob)
        shift[:, column] = STEP
        up, down = (spec(replace(b, bucket_log_prob=b.bucket_log_prob + s)) for s in (shift, -shift))
        require_close(gradient[:, column], (up - down) / (2 * STEP), "gradient, against a difference", 1e-5, 1e-6)


def coarser_is_less(spec: Any, case: BatchCase) -> None:
    """With fewer buckets the divergence is smaller or equal: a lower bound."""
    b = case.batch
    assert b.bucket_log_prob is not None and b.teacher_bucket_log_prob is not None
    student, teacher = b.bucket_log_prob[:, 1:], b.teacher_bucket_log_prob[:, 1:]
    fewer = replace(b, bucket_log_prob=student, teacher_bucket_log_prob=teacher)
    require_that(bool((spec(fewer) <= spec(b) + 1e-9).all()), "merging two buckets raised the divergence")


def distillation_split(spec: Any, case: BatchCase) -> None:
    """Numerator, denominator and metrics add over micro-batches."""
    b = case.batch
    batches = (b, *map(b.take, case.parts()))
    whole, *parts = (distillation_loss(x, divergence=spec, aggregate=TokenSum()) for x in batches)
    require_close(torch.stack([part.numerator for part in parts]).sum(), whole.numerator, "sum over micro-batches")
    require_that(all(part.metrics.keys() == whole.metrics.keys() for part in parts), "metrics depend on the batch")


def unbiased(spec: Any, case: int) -> None:
    """Over all tokens of a small vocabulary, the estimate from the sampled token and its gradient have the divergence
    and its gradient as expected values, even for samples from a policy other than π."""
    draw = torch.Generator().manual_seed(case)
    logits, teacher, sampler = (torch.randn(WORDS, generator=draw, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    student, tau, mu = (x.log_softmax(0) for x in (logits, teacher, sampler))
    b = PolicyBatch(
        log_prob=student,
        loss_mask=torch.ones(WORDS, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, WORDS]),
        proximal_log_prob=mu,
        teacher_log_prob=tau,
        bucket_log_prob=student.expand(WORDS, WORDS),
        teacher_bucket_log_prob=tau.expand(WORDS, WORDS),
    )
    exact = replace(spec, top_k=WORDS)(b)[0]
    expected = (mu.exp() * spec(b)).sum()
    require_close(expected.detach(), exact.detach(), "expected value of the estimate", 1e-6, 1e-6)
    gradient, true = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (expected, exact))
    require_close(gradient, true, "expected gradient of the estimate", 1e-6, 1e-6)


def distillation_outcome(spec: Any, b: PolicyBatch) -> tuple[Tensor, ...]:
    """The outcome of a divergence: its value."""
    return (spec(b).detach(),)


def finite_distillation(spec: Any, b: PolicyBatch) -> None:
    """Value and gradient are finite, even where one of the two policies excludes a token."""
    far = torch.stack([b.log_prob.detach(), torch.full_like(b.log_prob, -torch.inf).detach()], 1)
    b = replace(b, teacher_log_prob=b.reference_log_prob, bucket_log_prob=far, teacher_bucket_log_prob=far.flip(1))
    require_that(bool(spec(b).isfinite().all()), "the divergence is not finite")
    require_that(bool(_gradient(spec, b).isfinite().all()), "the gradient is not finite")
    require_that(all(bool(x.isfinite().all()) for x in buckets(b)), "a bucket is not finite")


def of_buckets(spec: Any) -> str | None:
    return None if spec.top_k else "with top_k 0 there are no buckets"


def of_samples(spec: Any) -> str | None:
    return "it is not an estimate" if spec.top_k else None


# fmt: off
DISTILLATION_LAWS = (
    runs_law(tensor_runs, *ORDINARY),
    Law("value", "the divergence leaks out of the loss, or turns the weights into NaN", value_law, *BATCHES, root=True,
        cure=f"{MASKED}; {FINITE}"),
    Law("zero_where_equal", "a student that has learned everything is still moved", zero_where_equal, *BATCHES,
        cure="a divergence of a distribution from itself is 0, and so is its gradient"),
    Law("derivative", "the optimizer minimises something else", bucket_derivative, *BATCHES, applies=of_buckets,
        cure="detach nothing that the value depends on through the student's log-probs"),
    Law("coarser_is_less", "it is not a lower bound", coarser_is_less, *BATCHES, applies=of_buckets,
        cure="sum a convex function over the buckets, the rest of the vocabulary included"),
    Law("micro_batches", "the loss depends on the memory of the machine", distillation_split, *BATCHES,
        cure="compute each token's value from that token"),
    Law("unbiased", "the student is drawn elsewhere", unbiased, lambda: range(6), applies=of_samples,
        cure="weigh the estimate by the ratio of the student to the policy that sampled"),
    *needs_laws(lambda spec, b: distillation_loss(b, divergence=spec, aggregate=TokenSum()), distillation_outcome),
    extreme_law(finite_distillation),
)
# fmt: on
