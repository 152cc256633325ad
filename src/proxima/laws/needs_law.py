"""The laws that every slot of a loss has: a spec declares in `needs` exactly the tensors that it reads."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from proxima.data.policy_batch import PolicyBatch
from proxima.laws.batches import BATCHES, batch_cases, make_batch, with_entropy_leaf, with_new_leaf
from proxima.laws.law import Law, Violation, require_that

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
    value = getattr(b, name).flip(0)
    return replace(b, **{name: value if value.is_floating_point() else value + 1})


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
    waste, unused = "a run computes a tensor that nobody reads", "remove from `needs` what the call does not use"
    return (
        Law("needs", consequence, check, *BATCHES, cure=exactly),
        Law("needs_are_read", waste, lambda spec, _: needs_are_read(spec, outcome), cure=unused),
    )
