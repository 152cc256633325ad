"""Laws of surrogates."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from proxima.core import AGGREGATES, Loss, TokenMean, TokenSum, gradient_weight, merge_metrics, policy_loss, precompute
from proxima.core.metrics import Metrics
from proxima.data.policy_batch import PolicyBatch
from proxima.laws.batches import BATCHES, BatchCase, make_batch, with_new_leaf
from proxima.laws.first_laws import (
    FINITE,
    MASKED,
    ORDINARY,
    needs_laws,
    require_column,
    require_finite,
    runs_law,
    surrogate_runs,
    values_at,
)
from proxima.laws.law import Law, Violation, require_close, require_that, same

STEP = 1e-6  # step of the central differences, nats


def loss_and_gradient(
    b: PolicyBatch, spec: Any, aggregate: Any, correction: Any = None, check: bool = True
) -> tuple[Loss, Tensor]:
    """`policy_loss` and d value / d log_prob [N]."""
    loss = policy_loss(b, surrogate=spec, aggregate=aggregate, correction=correction, check=check)
    (gradient,) = torch.autograd.grad(loss.value, b.log_prob, retain_graph=True)
    return loss, gradient


def surrogate_shape(spec: Any, case: BatchCase) -> None:
    """Shapes and dtypes are right, `keep` is False outside the loss, and metrics are detached."""
    b = case.batch
    token = spec(b)
    require_column(token.loss, b, "loss")
    require_that(token.loss.dtype == b.log_prob.dtype, f"loss is {token.loss.dtype}, expected {b.log_prob.dtype}")
    require_that(token.keep.dtype == torch.bool, f"keep is {token.keep.dtype}, expected torch.bool")
    require_that(not bool((token.keep & ~b.loss_mask).any()), "keep is True outside the loss mask")
    require_that(token.unit in ("token", "sequence"), f"unit is {token.unit!r}, expected token or sequence")
    wrong = {name: metric for name, metric in token.metrics.items() if not is_dataclass(metric)}
    plain = [f"{name} is a {type(metric).__name__}" for name, metric in wrong.items()]
    over = "use SumCount.over(x, mask), with x and mask [N]: micro-batches are merged by sum and count"
    require_that(not plain, f"of the metrics, {', '.join(plain)}; {over}")
    first = {name: getattr(metric, fields(metric)[0].name) for name, metric in token.metrics.items()}
    attached = [name for name, tensor in first.items() if tensor.requires_grad]
    require_that(not attached, f"metrics carry a gradient: {', '.join(attached)}; detach them")


def masked_nan(spec: Any, case: BatchCase) -> None:
    """NaN and other garbage outside the loss affect neither value nor gradient."""
    b = case.batch
    token = spec(b).loss
    leaking = (~b.loss_mask & (token != 0)).nonzero().flatten().tolist()
    if leaking:
        value = float(token.detach()[leaking[0]])
        shown = values_at(b, spec, leaking[0])
        raise Violation(f"loss is not 0 outside the loss mask: {value:g} at token {leaking[0]}, with {shown}")
    require_finite(token, b, spec, "the loss")
    for kind in case.aggregates:
        loss, gradient = loss_and_gradient(with_new_leaf(b), spec, AGGREGATES[kind]())
        require_that(bool(loss.value.isfinite()), f"the loss is {float(loss.value.detach())}")
        require_that(bool(gradient.isfinite().all()), "the gradient is not finite")
        require_that(bool((gradient[~b.loss_mask] == 0).all()), "the gradient is not 0 outside the loss mask")
        if not bool(b.loss_mask.any()):
            require_that(float(loss.value.detach()) == 0, "nothing is in the loss, yet it is not 0")


def surrogate_permutation(spec: Any, case: BatchCase) -> None:
    """The order of the sequences is irrelevant."""
    b = case.batch
    order = case.order()
    for kind in case.aggregates:
        aggregate = AGGREGATES[kind]
        loss, gradient = loss_and_gradient(b, spec, aggregate())
        again, shuffled = loss_and_gradient(with_new_leaf(b.take(order)), spec, aggregate())
        require_close(again.value, loss.value, "loss with the sequences in another order")
        require_close(shuffled, taken(b, gradient, order), "gradient with the sequences in another order")


def taken(b: PolicyBatch, values: Tensor, order: list[int]) -> Tensor:
    """[N] the values with the sequences in another order."""
    return PolicyBatch(log_prob=values, loss_mask=b.loss_mask, cu_seqlens=b.cu_seqlens).take(order).log_prob


def micro_batch_split(spec: Any, case: BatchCase) -> None:
    """Any split into micro-batches gives the same numerator, denominator, gradient and metrics."""
    for kind in case.aggregates:
        require_exact_split(case.batch, case.parts(), spec, AGGREGATES[kind]())


def require_exact_split(
    b: PolicyBatch, rows: list[list[int]], spec: Any, aggregate: Any, correction: Any = None
) -> None:
    """Raise `Violation` unless the micro-batches with these sequences add up to the whole batch."""
    ready = precompute(b, surrogate=spec, correction=correction)
    loss_of = partial(policy_loss, surrogate=spec, aggregate=aggregate, correction=correction)
    whole = loss_of(b)
    parts = [loss_of(ready.batch.take(part)) for part in rows]
    numerator = torch.stack([part.numerator for part in parts]).sum()
    denominator = torch.stack([part.denominator for part in parts]).sum()
    require_close(numerator, whole.numerator, "numerator, summed over micro-batches")
    require_close(denominator, whole.denominator, "denominator, summed over micro-batches")
    early = aggregate.denominator(ready.batch.loss_mask, ready.batch.cu_seqlens)
    require_close(early, whole.denominator, "denominator, before the forward")
    (gradient,) = torch.autograd.grad(numerator, b.log_prob, retain_graph=True)
    (expected,) = torch.autograd.grad(whole.numerator, b.log_prob, retain_graph=True)
    require_close(gradient, expected, "gradient, summed over micro-batches")
    require_merged([*(part.metrics for part in parts), ready.metrics], whole.metrics)


def require_merged(parts: list[Metrics], whole: Metrics) -> None:
    """Raise `Violation` unless the metrics of micro-batches merge into those of the whole batch."""
    together = merge_metrics(parts)
    different = sorted(together.keys() ^ whole.keys())
    require_that(not different, f"metrics depend on the batch: {', '.join(different)}; emit every key every time")
    for name, metric in whole.items():
        merged = torch.tensor(together[name].value, dtype=torch.float64)
        expected = torch.tensor(metric.value, dtype=torch.float64)
        require_close(merged, expected, f"metric {name}, merged over micro-batches")


def packing(spec: Any, case: BatchCase) -> None:
    """A padded batch and its packed form give the same loss."""
    b = case.batch
    rows = {name: b.to_padded(value.detach()) for name, value in b.token_fields().items() if name != "loss_mask"}
    padded = PolicyBatch.from_padded(b.to_padded(b.loss_mask), **rows)
    loss, _ = loss_and_gradient(b, spec, TokenMean())
    again, _ = loss_and_gradient(with_new_leaf(padded), spec, TokenMean())
    require_close(again.value, loss.value, "loss of the batch from padded rows")


def derivative(spec: Any, case: BatchCase) -> None:
    """The gradient is the derivative of the loss, except where a step crosses a kink or switches a mask."""
    require_slope(case.batch, case.batch.loss_mask.nonzero().flatten().tolist(), spec)


def require_slope(b: PolicyBatch, tokens: list[int], spec: Any, correction: Any = None) -> None:
    """Raise `Violation` unless the gradient at each of the tokens equals a central difference; passes where the
    one-sided differences disagree, at a kink or where a mask switches."""
    if not tokens:
        return
    loss_of = partial(policy_loss, surrogate=spec, aggregate=TokenSum(), correction=correction, check=False)
    numerator = loss_of(b).numerator
    (gradient,) = torch.autograd.grad(numerator, b.log_prob)
    middle = numerator.detach()
    for token in tokens:
        shift = torch.zeros_like(b.log_prob)
        shift[token] = STEP
        with torch.no_grad():
            up = loss_of(with_new_leaf(b, log_prob=b.log_prob.detach() + shift)).numerator
            down = loss_of(with_new_leaf(b, log_prob=b.log_prob.detach() - shift)).numerator
        right = (up - middle) / STEP
        left = (middle - down) / STEP
        slope = (right + left) / 2
        if float((right - left).abs()) <= 1e-3 * (1 + float(slope.abs())):
            require_close(
                gradient[token], slope, f"gradient at token {token}, against a central difference", 1e-4, 1e-5
            )


def zero_advantage(spec: Any, case: BatchCase) -> None:
    """An advantage of 0 gives loss and gradient 0, as if the sequence were not there."""
    b = case.batch
    first = b.sequence_index == 0
    zeroed = with_new_leaf(b, advantage=torch.where(first, 0.0, _present(b.advantage)))
    rest = with_new_leaf(b.take(list(range(1, b.sequences))))
    (with_zero, gradient), (without, _) = (loss_and_gradient(x, spec, TokenSum()) for x in (zeroed, rest))
    require_close(with_zero.numerator, without.numerator, "loss with a sequence of advantage 0, against without it")
    require_that(bool((gradient[first] == 0).all()), "a sequence of advantage 0 has a gradient")


def scale(spec: Any, case: BatchCase) -> None:
    """Four times the advantage gives four times the loss and the gradient."""
    b = case.batch
    louder = with_new_leaf(b, advantage=_present(b.advantage) * 4)
    (loss, gradient), (again, larger) = (loss_and_gradient(x, spec, TokenMean()) for x in (b, louder))
    require_close(again.value, 4 * loss.value, "loss at 4 times the advantage")
    require_close(larger, 4 * gradient, "gradient at 4 times the advantage")


def on_policy(spec: Any, case: BatchCase) -> None:
    """At ratio 1 the gradient is the policy gradient, -A."""
    b = case.batch
    level = b.masked("behavior_log_prob")
    advantage = torch.where(b.loss_mask, 0.5 - b.sequence_index % 3, 0.0).double()  # one number per sequence
    same = dict.fromkeys(("log_prob", "proximal_log_prob", "behavior_log_prob"), level)
    fresh = with_new_leaf(b, **same, top_k_log_prob=_present(b.behavior_top_k_log_prob), advantage=advantage)
    _, gradient = loss_and_gradient(fresh, spec, TokenSum(), check=False)
    require_close(gradient, -advantage, "gradient at ratio 1", 1e-7, 1e-9)


def plot_gradient(spec: Any, case: BatchCase) -> None:
    """For single-token sequences, `gradient_weight` is the gradient in `policy_loss`, divided by -A."""
    b = case.batch
    drawn = b.loss_mask & (b.masked("advantage") != 0)
    names = ("log_prob", "behavior_log_prob", "advantage")
    token, behavior, advantage = (b.masked(name).detach()[drawn] for name in names)
    if not len(token):
        return
    columns = {"log_prob": token, "behavior_log_prob": behavior, "proximal_log_prob": behavior}
    rows = {name: value[:, None] for name, value in columns.items()}
    alone = PolicyBatch.from_padded(torch.ones(len(token), 1), **rows, advantage=advantage)
    _, gradient = loss_and_gradient(with_new_leaf(alone), spec, TokenSum())
    weight = gradient_weight(spec, token, behavior, advantage)
    require_close(-advantage * weight, gradient, "gradient by `gradient_weight`, of each token on its own")


def two_policies(spec: Any) -> str | None:
    more = sorted(set(spec.needs) - {"advantage", "behavior_log_prob", "log_prob", "proximal_log_prob"})
    if not more:
        return None
    return f"it reads {', '.join(more)}"


def _present(values: Tensor | None) -> Tensor:
    assert values is not None
    return values


def unbounded(spec: Any, case: BatchCase) -> None:
    """With the fields in `unbounded` nothing bounds the update: the gradient is that of -A r."""
    b = case.batch
    _, gradient = loss_and_gradient(b, replace(spec, **spec.unbounded), TokenSum(), check=False)
    log_ratio = b.masked("log_prob").detach() - b.masked("proximal_log_prob")
    expected = -b.masked("advantage") * log_ratio.clamp(-20, 20).exp()
    require_close(gradient, expected, f"gradient with {spec.unbounded}, against that of -A r", 1e-7, 1e-9)


def single_precision(spec: Any, case: int) -> None:
    """float32 gives the same results as float64, up to rounding."""
    wide = make_batch([7, 1, 0, 12], seed=case, dtype=torch.float64)
    narrow = make_batch([7, 1, 0, 12], seed=case, dtype=torch.float32)
    expected, expected_gradient = loss_and_gradient(wide, spec, TokenMean())
    loss, gradient = loss_and_gradient(narrow, spec, TokenMean())
    require_that(gradient.dtype == torch.float32, f"the gradient of a float32 batch is {gradient.dtype}")
    require_close(loss.value, expected.value, "loss in float32", 2e-5, 2e-6)
    require_close(gradient, expected_gradient, "gradient in float32", 2e-5, 2e-6)


def empty(spec: Any, case: tuple[int, ...]) -> None:
    """The loss is finite for no sequence, no token and one token, and 0 if nothing is in the loss."""
    b = make_batch(list(case))
    loss = policy_loss(b, surrogate=spec, aggregate=TokenMean())
    require_that(bool(loss.value.isfinite()), f"the loss is {float(loss.value.detach())}")
    if not bool(b.loss_mask.any()):
        zero = float(loss.value.detach()) == float(loss.denominator) == 0
        require_that(zero, "nothing is in the loss: expected 0")


def _token_loss(spec: Any, b: PolicyBatch) -> tuple[Tensor, Tensor]:
    token = spec(b)
    return token.loss.detach(), token.keep


def extreme_batch(gap: float, pattern: str, dtype: torch.dtype) -> PolicyBatch:
    """A batch with ratios of π to all other policies of e^gap, e^-gap, or alternating."""
    b = make_batch([6, 4, 1], out_of_loss=0.0, not_sampled=0.0, garbage=False, dtype=dtype)
    place = torch.arange(len(b))
    up = {"up": place >= 0, "down": place < 0, "mixed": place % 2 == 0}[pattern]
    near = torch.full((len(b),), -0.01, dtype=dtype)
    far = torch.full((len(b),), -0.01 - gap, dtype=dtype)
    other = torch.where(up, far, near)
    names = ("behavior_log_prob", "proximal_log_prob", "next_log_prob", "reference_log_prob")
    return with_new_leaf(b, log_prob=torch.where(up, near, far), **dict.fromkeys(names, other))


def extreme_law(check: Any) -> Law:
    """The law that `check(spec, batch)` passes at ratios up to e^80, in float32 and float64."""
    kinds = product((8.0, 20.0, 45.0, 80.0), ("up", "down", "mixed"), (torch.float32, torch.float64))
    cases = [(extreme_batch(*kind), kind) for kind in kinds]
    shown = "one drifting token turns the weights into NaN"
    show = lambda case: "ratios of e^{:g}, {}, {}".format(*case[1])  # noqa: E731
    run = lambda spec, case: check(spec, case[0])  # noqa: E731
    return Law("extreme_ratios", shown, run, lambda: cases, show=show, cure="bound the log-ratio before exp")


def finite_surrogate(spec: Any, b: PolicyBatch) -> None:
    """Loss and gradient are finite."""
    loss, gradient = loss_and_gradient(b, spec, TokenMean())
    require_that(bool(loss.value.isfinite()), f"the loss is {float(loss.value.detach())}")
    require_that(bool(gradient.isfinite().all()), "the gradient is not finite")


def int32_edges(spec: Any, case: BatchCase) -> None:
    """int32 `cu_seqlens` give the same loss as int64."""
    narrow = with_new_leaf(replace(case.batch, cu_seqlens=case.batch.cu_seqlens.int()))
    loss, _ = loss_and_gradient(case.batch, spec, TokenMean())
    again, _ = loss_and_gradient(narrow, spec, TokenMean())
    require_close(again.value, loss.value, "loss with int32 cu_seqlens")


def pure(spec: Any, case: BatchCase) -> None:
    """The same batch gives the same loss, whatever the global random state, and is not modified."""
    before = {name: value.detach().clone() for name, value in case.batch.token_fields().items()}
    torch.manual_seed(1)
    first = spec(case.batch)
    torch.manual_seed(2)
    require_that(same(spec(case.batch).loss, first.loss), "two calls give different losses")
    for name, value in case.batch.token_fields().items():
        require_that(same(value.detach(), before[name]), f"the call changed the batch's {name} in place")


def declared(name: str) -> Callable[[Any], str | None]:
    """An `applies` for laws of the specs that declare `name`."""
    return lambda spec: None if getattr(spec, name) else f"the spec does not declare {name}"


EACH = (
    "compute each token's loss from that token, or from its sequence by `cu_seqlens`; declare `whole_batch` and "
    "`select_tokens` where that can't be"
)
# fmt: off
SURROGATE_LAWS = (
    runs_law(surrogate_runs, *ORDINARY),
    Law("shape", "aggregation and correction read the wrong tokens", surrogate_shape, *BATCHES, root=True,
        cure="return TokenLoss(loss, keep, metrics): loss and keep [N] as b.log_prob, keep within b.loss_mask"),
    Law("masked_nan", "one tool or padding token turns the weights into NaN", masked_nan, *BATCHES, root=True,
        cure=f"{MASKED}; {FINITE}"),
    Law("pure", "a resumed run differs", pure, *BATCHES, root=True,
        cure="draw nothing at random, change no tensor of the batch, keep no state between calls"),
    Law("permutation", "the result depends on the order of the completions", surrogate_permutation, *BATCHES,
        cure=EACH),
    Law("packing", "padded and packed training differ", packing, *BATCHES, cure=EACH),
    Law("micro_batches", "the loss depends on the memory of the machine", micro_batch_split, *BATCHES, cure=EACH),
    Law("derivative", "the optimizer minimises something else", derivative, *BATCHES, exemptible=True,
        cure="detach nothing that the loss depends on through log_prob, or declare `exempt_laws`"),
    Law("float32", "training differs from what float64 tests show", single_precision, lambda: range(5),
        exemptible=True, cure="make constants and new tensors like b.log_prob, and subtract before exp"),
    Law("empty", "an empty rank or an empty completion ends the run", empty, lambda: [(), (0,), (0, 0), (1,)],
        cure="reduce with sums, which are 0 over nothing; max, mean and indexing fail there"),
    Law("zero_advantage", "completions that the loop skips would have taught something", zero_advantage, *BATCHES,
        applies=declared("zero_advantage_inert"), cure="set zero_advantage_inert = False"),
    Law("scale", "rewards in other units change the method", scale, *BATCHES, exemptible=True,
        cure="let the advantage multiply the loss, or declare `exempt_laws`"),
    Law("on_policy", "on fresh data it is not a policy gradient", on_policy, *BATCHES, exemptible=True,
        cure="a loss is minimised: at ratio 1 its derivative is -A; or declare `exempt_laws`"),
    Law("unbounded", "the bound does not vanish where the docstring says so", unbounded, *BATCHES,
        applies=declared("unbounded"), defaults_only=True,
        cure="correct the fields of `unbounded`, or remove it"),
    *needs_laws(lambda spec, b: policy_loss(b, surrogate=spec, aggregate=TokenSum()), _token_loss,
                "a run fails late, or trains on something that nobody supplies on purpose"),
    extreme_law(finite_surrogate),
    Law("curve", "its plot shows another gradient than trains", plot_gradient, *BATCHES, cure=EACH,
        applies=two_policies),
    Law("int32_edges", "batches of another framework crash", int32_edges, *BATCHES,
        cure="convert b.cu_seqlens with .long() where it is an index"),
)
# fmt: on
