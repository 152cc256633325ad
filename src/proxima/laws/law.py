"""Laws, their checks on many cases, and the search for the smallest case that breaks one."""

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor


class Violation(AssertionError):
    """A spec broke a law; the text says which number was wrong."""


@dataclass(frozen=True)
class Law:
    """A property that every spec of a slot must have.

    Args:
        name: its name in `exempt_laws` and in the output.
        consequence: what goes wrong in a run when it does not hold.
        check: `check(spec, case)` raises `Violation`; any other exception also counts as a violation.
        cases: `cases()` yields inputs, the smallest first; by default a single None, for a law of the spec alone.
        shrink: `shrink(case)` yields smaller versions of a case.
        show: `show(case)` describes a case in one line; empty for None.
        exemptible: a spec may declare itself exempt, because the mathematics of some methods break this law.
        applies: `applies(spec)` is None, or the reason why the law does not apply.
        defaults_only: check it only with default settings, not with `test_fields`.
        cure: what to change in a class that breaks it.
        root: if it fails, the laws after it are not tried, because the same defect would make them fail.
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
    cure: str = ""
    root: bool = False


_NOT_TRIED = Law("not_tried", "", lambda spec, case: None)


@dataclass(frozen=True)
class LawResult:
    """One line of `proxima check`: `status` is passed, FAILED or skipped; `detail` says why, with the counterexample;
    `variant` names the `test_fields`."""

    law: Law
    status: Literal["passed", "FAILED", "skipped"]
    detail: str = ""
    variant: str = ""

    @property
    def fails_all(self) -> bool:
        """True if the same defect would make all later laws fail."""
        return self.status == "FAILED" and self.law.root


def check_laws(laws: Sequence[Law], spec: Any) -> Iterator[LawResult]:
    """Check laws in order, up to the first root that fails; a law that raises the same error as an earlier one refers
    to it."""
    raised: dict[str, str] = {}
    for index, law in enumerate(laws):
        result = check_law(law, spec)
        text, _, _ = result.detail.partition("; counterexample: ")
        earlier = law.name
        if text.startswith("raised "):
            earlier = raised.setdefault(text, law.name)
        if earlier == law.name:
            yield result
        else:
            yield LawResult(law, result.status, f"as {earlier}")
        if result.fails_all:
            rest = laws[index + 1 :]
            if rest:
                yield not_tried(rest, law)
            return


def not_tried(laws: Sequence[Law], root: Law) -> LawResult:
    """The result for the laws after a root that failed."""
    names = ", ".join(law.name for law in laws) or "every law of the slot"
    return LawResult(_NOT_TRIED, "skipped", f"{names}: none can hold before `{root.name}` does")


def check_law(law: Law, spec: Any) -> LawResult:
    """Check one law on all its cases; stop at the first violation and shrink it."""
    try:
        reason = law.applies(spec)
    except Exception as error:
        return LawResult(law, "FAILED", described(error))
    if reason is not None:
        return LawResult(law, "skipped", reason)
    broken = first_violation(law, spec, law.cases())
    if broken is None:
        return LawResult(law, "passed")
    case, text = smallest(law, spec, *broken)
    shown = law.show(case)
    if shown:
        text = f"{text}; counterexample: {shown}"
    return LawResult(law, "FAILED", text)


def check_exemption(law: Law, specs: Iterable[Any]) -> LawResult:
    """Run a law on the settings of a spec that declare themselves exempt: at least one of them must break it."""
    for spec in specs:
        broken = first_violation(law, spec, law.cases())
        if broken is not None:
            return LawResult(law, "skipped", f"exempt, and indeed fails: {broken[1]}")
    remedy = "remove the exemption, or name settings in test_fields that fail"
    return LawResult(law, "FAILED", f"exempt, but holds: {remedy}")


def first_violation(law: Law, spec: Any, cases: Iterable[Any]) -> tuple[Any, str] | None:
    """The first case that breaks the law, with the violation."""
    for case in cases:
        text = violation(law, spec, case)
        if text is not None:
            return case, text
    return None


def violation(law: Law, spec: Any, case: Any) -> str | None:
    """The violation of the law by the spec on this case, or None."""
    try:
        law.check(spec, case)
    except Violation as error:
        return str(error)
    except Exception as error:  # third-party code may raise anything
        return described(error)
    return None


def described(error: Exception) -> str:
    """`raised KeyError: 'x' (lab.py:12)`, with the innermost line outside proxima and installed packages."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if "site-packages" not in frame.filename and not _is_ours(frame.filename)]
    text = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
    if not outside:
        return text
    innermost = outside[-1]
    return f"{text} ({Path(innermost.filename).name}:{innermost.lineno})"


def _is_ours(file: str) -> bool:
    place = Path(file)
    return _PACKAGE in place.parents or place.parent.name == "asyncio"


_PACKAGE = Path(__file__).parents[1]


def smallest(law: Law, spec: Any, case: Any, text: str) -> tuple[Any, str]:
    """Shrink greedily while some smaller case still breaks the law."""
    while (smaller := first_violation(law, spec, law.shrink(case))) is not None:
        case, text = smaller
    return case, text


def require_that(condition: bool, text: str) -> None:
    """Raise `Violation` with the text unless the condition holds."""
    if not condition:
        raise Violation(text)


def same(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors are equal; NaN equals NaN."""
    if first.shape != second.shape:
        return False
    equal = (first == second) | (first.isnan() & second.isnan())
    return bool(equal.all())


def require_close(actual: Tensor, expected: Tensor, what: str, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    """Raise `Violation` naming the element that is farthest off, unless both tensors agree; NaN agrees with NaN,
    because other laws check for NaN."""
    require_that(actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}")
    actual = actual.detach().double()
    expected = expected.detach().double()
    off = (actual - expected).abs() - (atol + rtol * expected.abs())
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    off = torch.where(same, -torch.inf, off.nan_to_num(nan=torch.inf))
    if off.numel() and float(off.max()) > 0:
        at = int(off.flatten().argmax())
        if off.dim():
            what = f"{what} at {at}"
        measured = float(actual.flatten()[at])
        correct = float(expected.flatten()[at])
        raise Violation(f"{what}: {measured:.9g}, expected {correct:.9g}")
