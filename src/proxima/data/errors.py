"""Errors that the user can fix. Everything else that is raised is a bug in proxima.

    UserError     the command line prints it as one line and exits with 2
    FieldError    one field of a spec, a config or a file holds a bad value; the config adds the field's path and origin

No code parses a message: what a handler needs is an attribute.
"""

from typing import Any


class UserError(ValueError):
    """Something the user can fix.

    Args:
        message: what is wrong, with the offending value; one line.
        remedy: what to do about it; one clause, no full stop. Empty when the message says it already.
    """

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message, self.remedy = message, remedy

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class FieldError(UserError):
    """A field holds a value that it may not hold.

    Args:
        field: name of the field, or its dotted path below the object that raised.
        value: the offending value.
        bound: what the value must be, starting with a verb: "must be > 0".
        remedy: see `UserError`.
    """

    def __init__(self, field: str, value: Any, bound: str, *, remedy: str = "") -> None:
        super().__init__(f"{field}={value!r} {bound}", remedy=remedy)
        self.field, self.value, self.bound = field, value, bound


def require(condition: bool, field: str, value: object, bound: str, *, remedy: str = "") -> None:
    """Raise `FieldError` unless the condition holds."""
    if not condition:
        raise FieldError(field, value, bound, remedy=remedy)
