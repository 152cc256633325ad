"""What a law is, how it is checked on many cases, and the smallest case that breaks it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


class Violation(AssertionError):
    """A spec broke a law; the text says which number was wrong."""


@dataclass(frozen=True)
class Law:
    """A property that every spec of a slot must have.

    Args:
        name: what `exempt_laws` and the output call it.
        consequence: what goes wrong in a run when it does not hold.
        check: `check(spec, case)` raises `Violation`; any other exception breaks the law too.
        cases: `cases()` yields inputs, the smallest first; by default one, None, for a law of the spec alone.
        shrink: `shrink(case)` yields smaller versions of a case.
        show: `show(case)` describes a case in one line; None as nothing.
        exemptible: a spec may declare itself exempt, because the mathematics of some methods break this law.
        applies: `applies(spec)` is None, or why there is nothing to check.
        defaults_only: it does not hold under every `test_fields`.
    """

    name: str
    consequence: str
    check: Callable[[Any, Any], None]
    cases: Callable[[], Iterable[Any]] = lambda: (None,)
    shrink: Callable[[Any], Iterator[Any]] = lambda case: iter(())
    show: Callable[[Any], str] = lambda case: "" if case is None else str(case)
    exemptible: bool = False
    applies: Callable[[Any], str | None] = lambda spec: None
    defaults_only: bool = False


@dataclass(frozen=True)
class LawResult:
    """One line of `proxima check`: `status` is passed, FAILED or skipped; `detail` why, with the counterexample;
    `variant` names the `test_fields`."""

    law: Law
    status: Literal["passed", "FAILED", "skipped"]
    detail: str = ""
    variant: str = ""


def check_law(law: Law, spec: Any) -> LawResult:
    """Check one law on all its cases; stops at the first violation and shrinks it."""
    if (reason := law.applies(spec)) is not None:
        return LawResult(law, "skipped", reason)
    for case in law.cases():
        if (text := violation(law, spec, case)) is not None:
            case, text = smallest(law, spec, case, text)
            shown = law.show(case)
            return LawResult(law, "FAILED", f"{text}{f'; counterexample: {shown}' if shown else ''}")
    return LawResult(law, "passed")


def check_exemption(law: Law, specs: Iterable[Any]) -> LawResult:
    """Run a law all the same on the settings of a spec that declare themselves exempt: one of them must break it."""
    for spec in specs:
        for case in law.cases():
            if (text := violation(law, spec, case)) is not None:
                return LawResult(law, "skipped", f"exempt, and indeed fails: {text}")
    remedy = "remove the exemption, or name settings in test_fields that fail"
    return LawResult(law, "FAILED", f"exempt, but holds: {remedy}")


def violation(law: Law, spec: Any, case: Any) -> str | None:
    """What is wrong with the spec on this case, or None."""
    try:
        law.check(spec, case)
    except Violation as error:
        return str(error)
    except Exception as error:  # a stranger's code may raise anything
        return f"raised {type(error).__name__}: {' '.join(str(error).split())}"
    return None


def smallest(law: Law, spec: Any, case: Any, text: str) -> tuple[Any, str]:
    """Shrink greedily as long as some smaller case still breaks the law."""
    while True:
        for candidate in law.shrink(case):
            if (found := violation(law, spec, candidate)) is not None:
                case, text = candidate, found
                break
        else:
            return case, text


def require_that(condition: bool, text: str) -> None:
    """Raise `Violation` with the text unless the condition holds."""
    if not condition:
        raise Violation(text)


def require_close(actual: Tensor, expected: Tensor, what: str, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    """Raise `Violation` naming the element that is farthest off, unless both tensors agree."""
    require_that(actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}")
    actual, expected = actual.detach().double(), expected.detach().double()
    off = (actual - expected).abs() - (atol + rtol * expected.abs())
    off = torch.where(actual == expected, -torch.inf, off.nan_to_num(nan=torch.inf))
    if off.numel() and float(off.max()) > 0:
        at = int(off.flatten().argmax())
        where = f" at {at}" if off.dim() else ""
        found, wanted = (float(x.flatten()[at]) for x in (actual, expected))
        raise Violation(f"{what}{where}: {found:.9g}, expected {wanted:.9g}")
