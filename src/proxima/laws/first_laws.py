"""The laws that every slot of a loss has.

The first: a call on ordinary inputs returns the slot's type, with finite numbers. If it fails, the other laws of the
slot are not tried: their failures would follow from it. Then: a spec declares in `needs` exactly the tensors that it
reads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from proxima.core.loss import Corrected, TokenLoss
from proxima.data.policy_batch import PolicyBatch
from proxima.laws.batches import (
    BATCHES,
    BatchCase,
    batch_cases,
    make_batch,
    show_batch,
    smaller_batches,
    with_entropy_leaf,
    with_new_leaf,
)
from proxima.laws.law import Law, Violation, require_that

FINITE = "clamp before exp and log, and divide by no number that can be 0"
CURE = f"correct the call for this input, by the example in CONTRIBUTING.md; against NaN: {FINITE}"
MASKED = "read tensors as b.masked(name), 0 outside the loss mask, and return torch.where(b.loss_mask, value, 0.0)"


def ordinary_cases() -> Iterator[BatchCase]:
    """Batches without garbage whose tokens are all in the loss, off the behavior policy and on it."""
    clean_batch = partial(make_batch, seed=5, out_of_loss=0.0, not_sampled=0.0, garbage=False)
    for lengths, spread, proximal in (([1], 0.3, "recompute"), ([3, 2], 0.3, "recompute"), ([2], 0.0, "behavior")):
        yield BatchCase(clean_batch(lengths, spread=spread, proximal=proximal))


def require_kind(returned: Any, kind: type, how: str) -> None:
    """Raise `Violation` unless the call returned an instance of `kind`."""
    if returned is None:
        raise Violation(f"it returns None, expected {how}: does `__call__` exist, and end with `return`?")
    require_that(isinstance(returned, kind), f"it returns a {type(returned).__name__}, expected {how}")


def require_column(value: Any, b: PolicyBatch, what: str) -> None:
    """Raise `Violation` unless `value` is a tensor [N] like `log_prob`."""
    require_kind(value, Tensor, f"a tensor [{len(b)}] as {what}")
    require_that(value.shape == b.log_prob.shape, f"{what} has shape {list(value.shape)}, expected [{len(b)}]")


def require_finite(values: Tensor, b: PolicyBatch, spec: Any, what: str) -> None:
    """Raise `Violation` naming the first token whose value is not finite, and what the spec reads there."""
    bad = (~values.detach().isfinite()).nonzero().flatten().tolist()
    if not bad:
        return
    token = bad[0]
    value = float(values.detach()[token])
    text = f"{what} of token {token} is {value:g}, with {values_at(b, spec, token)}"
    if not bool(b.loss_mask[token]):
        text = f"{text}, outside the loss mask"
    raise Violation(text)


def values_at(b: PolicyBatch, spec: Any, token: int) -> str:
    """`log_prob -0.3, advantage nan`: the values that the spec reads for a token."""
    names = ("log_prob", *sorted(set(spec.needs) - {"log_prob"}))
    read = {name: getattr(b, name) for name in names if hasattr(b, name)}
    flat = {name: x.detach() for name, x in read.items() if isinstance(x, Tensor) and x.shape == b.log_prob.shape}
    return ", ".join(f"{name} {float(x[token]):.4g}" for name, x in flat.items())


def surrogate_runs(spec: Any, case: BatchCase) -> None:
    """The surrogate returns a `TokenLoss` of finite numbers that depends on `log_prob`."""
    b = case.batch
    token = spec(b)
    require_kind(token, TokenLoss, "a TokenLoss(loss, keep, metrics)")
    require_column(token.loss, b, "loss")
    require_column(token.keep, b, "keep")
    require_finite(token.loss, b, spec, "the loss")
    require_that(token.loss.requires_grad, "the loss has no gradient: it does not depend on log_prob, or is detached")
    (gradient,) = torch.autograd.grad(token.loss.sum(), b.log_prob)
    require_finite(gradient, b, spec, "the gradient")


def correction_runs(spec: Any, case: BatchCase) -> None:
    """The correction returns a `Corrected` with finite weights."""
    corrected = spec(case.batch)
    require_kind(corrected, Corrected, "a Corrected(weight, keep, metrics)")
    require_column(corrected.weight, case.batch, "weight")
    require_column(corrected.keep, case.batch, "keep")
    require_finite(corrected.weight, case.batch, spec, "the weight")


def tensor_runs(spec: Any, case: BatchCase) -> None:
    """The call returns a tensor of finite numbers."""
    b = with_entropy_leaf(case.batch)
    value = spec(b)
    require_column(value, b, "its value")
    require_finite(value, b, spec, "the value")


def aggregate_runs(spec: Any, case: BatchCase) -> None:
    """Numerator and denominator are finite numbers."""
    b = case.batch
    loss = b.masked("advantage").detach()
    numbers = {"the numerator": spec(loss, b), "denominator()": spec.denominator(b.loss_mask, b.cu_seqlens)}
    for what, value in numbers.items():
        require_kind(value, Tensor, f"a float64 number as {what}")
        require_that(value.numel() == 1, f"{what} has shape {list(value.shape)}, expected one number")
        finite = bool(value.isfinite().all())
        require_that(finite, f"{what} is {float(value):g}, for losses {[round(x, 4) for x in loss.tolist()]}")


ORDINARY = (ordinary_cases, smaller_batches, show_batch)  # arguments of a `Law`: cases, shrink, show
runs_law = partial(Law, "runs", "no run can use it", cure=CURE, root=True)  # (check, cases, shrink, show)


Outcome = Callable[[Any, PolicyBatch], tuple[Tensor, ...]]  # (spec, batch) → the outcome of the spec
Run = Callable[[Any, PolicyBatch], object]  # (spec, batch): raises where a run would
NOT_NEEDED = ("sampled", "group", "selected", "weight", "host_counts")  # optional, but no spec can demand them
OPTIONAL_FIELDS = tuple(f.name for f in fields(PolicyBatch) if f.default is None and f.name not in NOT_NEEDED)


def needs_are_read(spec: Any, outcome: Outcome) -> None:
    """Every tensor in `needs` changes the outcome of some batch."""
    unread = set(spec.needs) - {"log_prob"}
    long = make_batch([200, 300])
    for b in (*(case.batch for case in batch_cases()), with_new_leaf(long, advantage=3 * long.masked("advantage"))):
        plain = outcome(spec, b) if unread else ()
        unread -= {name for name in unread if not _same(plain, outcome(spec, _with_other(b, name)))}
    names = ", ".join(sorted(unread))
    require_that(not unread, f"needs declares {names}, which changes no result; remove it from needs")


def _with_other(b: PolicyBatch, name: str) -> PolicyBatch:
    """The batch with other values in a field: floats of other tokens, or other ids."""
    value: Tensor = getattr(b, name).flip(0)
    if not value.is_floating_point():
        value = value + 1
    return replace(b, **{name: value})


def _same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a.double().nan_to_num(0.123), b.double().nan_to_num(0.123)) for a, b in pairs)


def require_needs(spec: Any, b: PolicyBatch, run: Run, outcome: Outcome) -> None:
    """Raise `Violation` unless `run(spec, batch)` works with exactly `spec.needs`, names each of them if it is missing,
    and has the same outcome without the other tensors."""
    unknown = sorted(set(spec.needs) - {"log_prob", *OPTIONAL_FIELDS})
    require_that(not unknown, f"needs names no field of PolicyBatch: {', '.join(unknown)}")
    others = set(OPTIONAL_FIELDS) - set(spec.needs)
    try:
        run(spec, _without(b, others))
    except Exception as error:
        names = ", ".join(sorted(spec.needs)) or "log_prob"
        raise Violation(f"with only {names} in the batch it raised {error}; add what it reads to needs") from None
    plain = outcome(spec, b)
    # one by one, which also finds tensors that are read only if another is present; slow, so only on larger batches
    each = b.sequences > 3 or not _same(plain, outcome(spec, _without(b, others)))
    read = [name for name in sorted(others) if each and not _same(plain, outcome(spec, _without(b, {name})))]
    require_that(not read, f"without {', '.join(read)} the result is another one; add what it reads to needs")
    for name in sorted(set(spec.needs) - {"log_prob"}):
        try:
            run(spec, _without(b, {*others, name}))
        except ValueError as error:
            require_that(f"`{name}`" in str(error), f"without {name} it raised {error}; the message must name it")
        else:
            raise Violation(f"it runs without {name}, which needs declares; remove it from needs")


def _without(b: PolicyBatch, names: set[str]) -> PolicyBatch:
    """The batch without these fields; the proximal policy does not default to behavior."""
    changes: dict[str, Any] = dict.fromkeys(names)
    bare = replace(b, **changes)
    for name in names:
        object.__setattr__(bare, name, None)
    return bare


def needs_laws(run: Run, outcome: Outcome, consequence: str = "a run fails late") -> tuple[Law, Law]:
    """The laws of `require_needs` and `needs_are_read`."""
    check = lambda spec, case: require_needs(spec, with_entropy_leaf(case.batch), run, outcome)  # noqa: E731
    exactly = "declare in `needs` what the call reads, and nothing else"
    waste = "a run computes a tensor that nobody reads"
    unused = "remove from `needs` what the call does not use"
    return (
        Law("needs", consequence, check, *BATCHES, cure=exactly),
        Law("needs_are_read", waste, lambda spec, _: needs_are_read(spec, outcome), cure=unused),
    )
