"""Laws of the other terms of a loss: corrections, penalties, aggregations, and the divergences of a distillation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxima.core import AGGREGATES, PpoClip, Reinforce, TokenMean, TokenSum, policy_loss
from proxima.core.distillation import buckets, distillation_loss
from proxima.core.loss import Surrogate, check_needs
from proxima.data.policy_batch import PolicyBatch
from proxima.laws.batches import BATCHES, BatchCase, with_entropy_leaf, with_new_leaf
from proxima.laws.first_laws import (
    FINITE,
    MASKED,
    ORDINARY,
    aggregate_runs,
    correction_runs,
    needs_laws,
    runs_law,
    tensor_runs,
)
from proxima.laws.law import Law, require_close, require_that
from proxima.laws.surrogate_laws import STEP, extreme_law, loss_and_gradient, require_exact_split, require_merged, taken


def partner(spec: Any) -> Surrogate:
    """A surrogate that the correction can be combined with."""
    if spec.conflict(PpoClip(), [spec]) is None:
        return PpoClip()
    return Reinforce()


def correction_shape(spec: Any, case: BatchCase) -> None:
    """Weights are finite, detached and at least 0; rejected tokens have weight 0; a term of the loss stays in it."""
    b = case.batch
    result = spec(case.batch)
    weight = result.weight
    keep = result.keep
    like = b.log_prob
    require_that(weight.shape == keep.shape == like.shape, f"weight and keep must have shape [{len(b)}]")
    require_that(weight.dtype == like.dtype, f"weight is {weight.dtype}, expected {like.dtype}")
    require_that(not weight.requires_grad, "weight carries a gradient; detach it")
    require_that(bool(weight.isfinite().all() and (weight >= 0).all()), "a weight is negative or not finite")
    require_that(not bool((keep & ~b.loss_mask).any()), "keep is True outside the loss mask")
    require_that(bool((weight[~keep & b.loss_mask] == 0).all()), "a rejected token has a weight")
    term = spec.loss_term(b, partner(spec), [spec])
    if term is not None:
        require_that(term.shape == like.shape, f"loss_term must have shape [{len(b)}]")
        require_that(bool(term.isfinite().all()), "loss_term is not finite")
        require_that(bool((term[~b.loss_mask] == 0).all()), "loss_term is not 0 outside the loss mask")


def correction_composition(spec: Any, case: BatchCase) -> None:
    """Loss and gradient stay finite, and neither a split nor the order of the sequences changes them."""
    b = case.batch
    surrogate = partner(spec)
    for kind in case.aggregates:
        aggregate = AGGREGATES[kind]
        loss, gradient = loss_and_gradient(b, surrogate, aggregate(), correction=spec)
        require_that(bool(loss.value.isfinite() and gradient.isfinite().all()), "loss or gradient is not finite")
        require_that(bool((gradient[~b.loss_mask] == 0).all()), "the gradient is not 0 outside the loss mask")
        require_exact_split(b, case.parts(), surrogate, aggregate(), spec)
        again, _ = loss_and_gradient(with_new_leaf(b.take(case.order())), surrogate, aggregate(), correction=spec)
        require_close(again.value, loss.value, "loss with the sequences in another order")


def correction_metrics(spec: Any, case: BatchCase) -> None:
    """The metrics of micro-batches, including empty ones, merge into those of the whole batch."""
    b = case.batch
    require_merged([spec(b.take(rows)).metrics for rows in case.parts()], spec(b).metrics)


def equal_policies(spec: Any, case: BatchCase) -> None:
    """If all policies equal the one that sampled, every loss token is kept with weight 1."""
    b = case.batch
    names = ("log_prob", "proximal_log_prob", "next_log_prob")
    result = spec(with_new_leaf(b, **dict.fromkeys(names, b.masked("behavior_log_prob"))))
    require_that(torch.equal(result.keep, b.loss_mask), "it rejects tokens of the policy that sampled them")
    require_close(result.weight[b.loss_mask], torch.ones_like(result.weight[b.loss_mask]), "weight at ratio 1")


def term_outcome(spec: Any, b: PolicyBatch) -> tuple[Tensor, ...]:
    """The outcome of a correction (weight, keep, term of the loss) or a penalty (value)."""
    term = spec(with_entropy_leaf(b))
    if isinstance(term, Tensor):
        return (term.detach(),)
    added = spec.loss_term(b, partner(spec), [spec])
    if added is None:
        return (term.weight, term.keep)
    return (term.weight, term.keep, added.detach())


def _called(spec: Any, b: PolicyBatch) -> None:
    check_needs(spec, b)
    spec(b)


def finite_correction(spec: Any, b: PolicyBatch) -> None:
    """Weights, loss and gradient are finite."""
    require_that(bool(spec(b).weight.isfinite().all()), "a weight is not finite")
    loss, gradient = loss_and_gradient(b, partner(spec), TokenMean(), correction=spec)
    require_that(bool(loss.value.isfinite() and gradient.isfinite().all()), "loss or gradient is not finite")


def finite_penalty(spec: Any, b: PolicyBatch) -> None:
    """Value and gradient are finite."""
    b = with_entropy_leaf(b)
    value = spec(b)
    gradient = torch.autograd.grad(value.sum() + 0 * b.log_prob.sum(), b.log_prob)[0]
    require_that(bool(value.isfinite().all() and gradient.isfinite().all()), "penalty or gradient is not finite")


def _reads(name: str, reason: str) -> Callable[[Any], str | None]:
    return lambda spec: None if name in spec.needs else reason


# fmt: off
CORRECTION_LAWS = (
    runs_law(correction_runs, *ORDINARY),
    Law("shape", "weights reach the wrong tokens", correction_shape, *BATCHES, root=True,
        cure=f"detach the weight, keep it at least 0 and finite, and 0 where keep is False; {MASKED}"),
    Law("composition", "the loss depends on the split or the order of the batch", correction_composition, *BATCHES,
        cure="weigh each token by that token or its sequence; `whole_batch` declares what can't be"),
    Law("metrics", "a metric depends on the memory of the machine", correction_metrics, *BATCHES,
        cure="emit sums and counts, every key every time",
        applies=lambda spec: "it sees the whole batch" if spec.whole_batch else None),
    Law("equal_policies", "data that needs no correction is changed", equal_policies, *BATCHES, exemptible=True,
        cure="a ratio of 1 is weight 1, kept; or declare `exempt_laws`",
        applies=_reads("behavior_log_prob", "it compares with no behavior policy")),
    *needs_laws(_called, term_outcome),
    extreme_law(finite_correction),
)
# fmt: on


def penalty_law(spec: Any, case: BatchCase) -> None:
    """A penalty is added to the loss, is finite, and is 0 outside the loss mask."""
    b = with_entropy_leaf(case.batch)
    value = spec(b)
    require_that(value.shape == b.log_prob.shape, f"shape {list(value.shape)}, expected [{len(b)}]")
    require_that(bool((value[~b.loss_mask] == 0).all()), "the penalty is not 0 outside the loss mask")
    require_that(bool(value.isfinite().all()), "the penalty is not finite")
    alone = policy_loss(b, surrogate=PpoClip(), aggregate=TokenSum())
    both = policy_loss(b, surrogate=PpoClip(), aggregate=TokenSum(), penalty=[spec, spec])
    require_close(both.numerator, alone.numerator + 2 * value.sum(), "loss with the penalty twice")
    (gradient,) = torch.autograd.grad(both.numerator, b.log_prob)
    require_that(bool(gradient.isfinite().all()), "the gradient is not finite")


def zero_at_reference(spec: Any, case: BatchCase) -> None:
    """A policy equal to the one that the penalty is towards, its reference, has penalty 0."""
    b = case.batch
    value = spec(with_new_leaf(b, log_prob=b.masked(_log_prob_of_reference(spec))))
    require_close(value, torch.zeros_like(value), "penalty of the reference policy itself")


def _log_prob_of_reference(spec: Any) -> str:
    return f"{vars(spec).get('towards', 'reference')}_log_prob"


# fmt: off
PENALTY_LAWS = (
    runs_law(tensor_runs, *ORDINARY),
    Law("added", "the penalty leaks out of the loss", penalty_law, *BATCHES, root=True, cure=f"{MASKED}; {FINITE}"),
    Law("zero_at_reference", "the policy is pushed away from its reference", zero_at_reference, *BATCHES,
        exemptible=True, cure="a divergence of a policy from itself is 0; or declare `exempt_laws`",
        applies=lambda spec: _reads(_log_prob_of_reference(spec), "it compares with no reference")(spec)),
    *needs_laws(_called, term_outcome),
    extreme_law(finite_penalty),
)
# fmt: on


def aggregate_law(spec: Any, case: BatchCase) -> None:
    """Numerator and denominator add up over micro-batches and ignore the order; the numerator is linear in the loss."""
    b = case.batch
    require_exact_split(b, case.parts(), PpoClip(), spec)
    loss = torch.where(b.loss_mask, b.masked("advantage"), 0.0)
    value = spec(loss, b)
    scalar = value.dim() == 0 and value.dtype == torch.float64
    require_that(scalar, f"the numerator is {value.dtype} {list(value.shape)}")
    require_close(spec(3 * loss, b), 3 * value, "numerator of 3 times the loss")
    order = case.order()
    require_close(spec(taken(b, loss, order), b.take(order)), value, "numerator in another order")
    denominator = spec.denominator(b.loss_mask, b.cu_seqlens)
    require_that(denominator.dtype == torch.float64 and float(denominator) >= 0, f"the denominator is {denominator}")
    if not bool(b.loss_mask.any()):
        require_that(float(denominator) == 0 and float(value) == 0, "nothing is in the loss: expected 0 / 0")


# fmt: off
AGGREGATE_LAWS = (
    runs_law(aggregate_runs, *ORDINARY),
    Law("linear", "gradient accumulation changes the loss", aggregate_law, *BATCHES,
        cure="return sums in float64: the loop divides numerator by denominator once, over all micro-batches"),
)
# fmt: on


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
    b = case.batch
    gradient = _gradient(spec, case.batch)
    assert b.bucket_log_prob is not None
    for column in range(b.bucket_log_prob.shape[1]):
        shift = torch.zeros_like(b.bucket_log_prob)
        shift[:, column] = STEP
        up = spec(replace(b, bucket_log_prob=b.bucket_log_prob + shift))
        down = spec(replace(b, bucket_log_prob=b.bucket_log_prob - shift))
        require_close(gradient[:, column], (up - down) / (2 * STEP), "gradient, against a difference", 1e-5, 1e-6)


def coarser_is_less(spec: Any, case: BatchCase) -> None:
    """With fewer buckets the divergence is smaller or equal: a lower bound."""
    b = case.batch
    assert b.bucket_log_prob is not None and b.teacher_bucket_log_prob is not None
    student = b.bucket_log_prob[:, 1:]
    teacher = b.teacher_bucket_log_prob[:, 1:]
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
    student = logits.log_softmax(0)
    tau = teacher.log_softmax(0)
    mu = sampler.log_softmax(0)
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
    (gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
    (true,) = torch.autograd.grad(exact, logits, retain_graph=True)
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
