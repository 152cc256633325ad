"""Errors that the user can fix. Any other exception is a bug in proxima.

    UserError     the command line prints it as one line and exits with 2
    NotFiniteError   the model computes NaN or infinity
    NoFieldError  a batch lacks a tensor that is read, or is given one that it does not have
    FieldError    one field of a spec, a config or a file holds a bad value; the config adds where it was written
    OverLengthError  the same for a row that is too long
    MissingDataError, MissingFileError  the data of a task are not on this machine
    suggestion    what the user may have meant, for the remedies
    counted, quoted  numbers of things, and texts, as messages write them

No code parses a message: everything a handler needs is an attribute.
"""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LONGEST_VALUE = 300  # characters
LONGEST_LINE = 2_000


def abbreviated(text: str, longest: int) -> str:
    """The text, or its beginning and end if it is longer: someone may have passed a whole file by mistake."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]} … {text[-longest // 3 :]} ({len(text):,} characters)"


def safe_repr(value: object) -> str:
    """`repr`, or a description if `repr` fails, as for an integer of thousands of digits or deeply nested lists."""
    try:
        return repr(value)
    except (RecursionError, ValueError):
        kind = type(value).__name__
        if isinstance(value, int):
            return f"<{kind} of {value.bit_length():,} bits>"
        return f"<{kind}>"


class UserError(ValueError):
    """Something the user can fix. Long lines and values in the message are abbreviated.

    Args:
        message: what is wrong, with the offending value; one line.
        remedy: what to do about it; one clause, no full stop. Empty when the message says it already.
    """

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy

    @property
    def reason(self) -> str:
        """The message without the remedy."""
        return str(self.args[0])

    def __str__(self) -> str:
        text = self.reason
        if self.remedy:
            text = f"{text}; {self.remedy}"
        if len(text) <= LONGEST_LINE:
            return text
        return "\n".join(abbreviated(line, LONGEST_LINE) for line in text.split("\n"))


class NotFiniteError(UserError):
    """Weights, gradients or probabilities are NaN or infinite: the model file is damaged, or the training diverged."""


class NoFieldError(ValueError):
    """A batch lacks a tensor that something reads, or is given one that it doesn't have."""


class FieldError(UserError):
    """A field holds an invalid value.

    Args:
        field: name of the field, or its dotted path below the object that raised; `within` prefixes it.
        value: the offending value.
        bound: what the value must be, or what is wrong with it, starting with a verb: "must be > 0".
        remedy: see `UserError`.
    """

    def __init__(self, field: str, value: Any, bound: str, *, remedy: str = "") -> None:
        super().__init__("", remedy=remedy)
        self.args = (field, value, bound)  # pickle passes these to __init__
        self.field = field
        self.value = value
        self.bound = bound

    @property
    def reason(self) -> str:
        return f"{self.field}={abbreviated(safe_repr(self.value), LONGEST_VALUE)} {self.bound}"

    @property
    def requirement(self) -> str:
        """Bound and remedy, for a reader who already sees the field and the value."""
        if self.remedy:
            return f"{self.bound}; {self.remedy}"
        return self.bound


class FieldErrors(UserError):
    """Several field errors from one pass; one line each."""

    def __init__(self, *errors: FieldError) -> None:
        super().__init__("")
        self.args = self.errors = errors

    @property
    def reason(self) -> str:
        return "\n".join(map(str, self.errors))


class OverLengthError(FieldError):
    """A row has more tokens than the model accepts."""


class MissingDataError(UserError):
    """The data of a task are not on this machine. `explain`, which needs none, only notes it."""


class MissingFileError(FieldError, MissingDataError):
    """A field names data that are not on this machine."""


def require(condition: bool, field: str, value: object, bound: str, *, remedy: str = "") -> None:
    """Raise `FieldError` unless the condition holds."""
    if not condition:
        raise FieldError(field, value, bound, remedy=remedy)


def require_threads(threads: int, remedy: str) -> None:
    """Raise `FieldError` for an impossible number of threads; `remedy` says what 0 means."""
    require(0 <= threads <= 1024, "threads", threads, "must be in [0, 1024]", remedy=remedy)


@contextmanager
def within(section: str) -> Iterator[None]:
    """Prefix the field of each `FieldError` raised inside: `with within("task"): rows = config.task.rows(seed)`."""
    try:
        yield
    except (FieldError, FieldErrors) as raised:
        errors: Sequence[FieldError] = [raised] if isinstance(raised, FieldError) else raised.errors
        for error in errors:
            error.field = f"{section}.{error.field}".removesuffix(".")
        raise


@contextmanager
def as_field_errors(kind: type[Exception]) -> Iterator[None]:
    """Replace exceptions of `kind`, which has the attributes of a `FieldError`, by a `FieldError`. Modules that import
    only the standard library have their own exception."""
    try:
        yield
    except kind as error:
        facts = vars(error)
        raise FieldError(facts["field"], facts["value"], facts["bound"], remedy=facts["remedy"]) from None


@contextmanager
def renamed(field: str, other: str) -> Iterator[None]:
    """Rename `field` to `other` in each `FieldError` raised inside: the model loader names `model.path`, but some
    models have their path in another field."""
    try:
        yield
    except FieldError as error:
        if error.field == field:
            error.field = other
        raise


def raise_together(errors: Sequence[FieldError]) -> None:
    """Raise the errors together; a single error is raised unwrapped, and an empty sequence raises nothing."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise FieldErrors(*errors)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The entry of `names` of which `name` is probably a typo; None if none is close."""
    near = difflib.get_close_matches(name, sorted(names), n=5, cutoff=0.65)
    near = near or [other for other in names if len(name) > 3 and other.startswith(name)]  # finish is finish_reason
    return min(near, key=lambda other: sorted(other) != sorted(name), default=None)  # gpro is grpo, not gspo


def nearest_divisor(value: int, number: int) -> int:
    """The divisor of `number` nearest to `value`, the larger of two; `value` itself for 0."""
    divisors = (d for d in range(1, number + 1) if number % d == 0)
    return min(divisors, key=lambda d: (abs(d - value), -d), default=value)


def counted(number: int, noun: str) -> str:
    """`1 row`, `2,048 rows`."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number:,} {noun}s"


def quoted(text: str, longest: int = LONGEST_VALUE) -> str:
    """A text in quotes, in one line, with its backslashes as a recipe has them; `repr` doubles them."""
    line = "".join(map(_printable, text))
    mark = '"' if "'" in line else "'"
    if len(line) > longest:
        line = f"{line[:longest]}…"
    return f"{mark}{line}{mark}"


def _printable(char: str) -> str:
    """The character, or its escape."""
    if char.isprintable():
        return char
    return repr(char)[1:-1]


def suggestion(name: str, names: Iterable[str], also: str = "") -> str:
    """`did you mean 'delta'?`, or if nothing is close, `known: delta, delta_b, w_min`, followed by `, or ` and
    `also`."""
    ordered = sorted(names)
    near = nearest(name, ordered)
    if near is not None:
        return f"did you mean {near!r}?"
    if not ordered:
        return f"there are none, only {also}" if also else "there are none"
    known = f"known: {', '.join(ordered)}"
    return f"{known}, or {also}" if also else known
