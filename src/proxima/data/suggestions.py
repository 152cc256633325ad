"""What the user may have meant, for the remedies of errors."""

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The entry of `names` of which `name` is probably a typo; None if none is close."""
    near = difflib.get_close_matches(name, sorted(names), n=5, cutoff=0.65)
    near = near or [other for other in names if len(name) > 3 and other.startswith(name)]  # finish is finish_reason
    return min(near, key=lambda other: sorted(other) != sorted(name), default=None)  # gpro is grpo, not gspo


def nearest_divisor(value: int, number: int) -> int:
    """The divisor of a number that is nearest to a value, the larger of two; every value divides 0."""
    divisors = (d for d in range(1, number + 1) if number % d == 0)
    return min(divisors, key=lambda d: (abs(d - value), -d), default=value)


def suggestion(name: str, names: Iterable[str], also: str = "") -> str:
    """`did you mean 'delta'?`, or, when nothing is close, `known: delta, delta_b, w_min, or `, and the form `also`."""
    ordered = sorted(names)
    if (near := nearest(name, ordered)) is not None:
        return f"did you mean {near!r}?"
    if not ordered:
        return f"there are none{', only ' + also if also else ''}"
    return "known: " + ", ".join(ordered) + (f", or {also}" if also else "")
