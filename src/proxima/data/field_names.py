"""Checks names that a caller gives for the fields of a dataclass."""

from collections.abc import Collection
from dataclasses import MISSING, fields
from typing import Any

from proxima.data.errors import NoFieldError
from proxima.data.suggestions import suggestion


def check_names(cls: type[Any], given: Collection[str], label: str, *, without: Collection[str] = ()) -> None:
    """Check names that become fields of a dataclass, except those that the caller fills in (`without`).

    Raises:
        NoFieldError: a name is not a field (the message suggests the nearest), or a required field is missing.
    """
    by_name = {f.name: f for f in fields(cls) if f.init and f.name not in without}
    for name in given:
        if name not in by_name:
            raise NoFieldError(f"{label}: {cls.__name__} has no field {name!r}; {suggestion(name, by_name)}")
    for name, f in by_name.items():
        if f.default is MISSING and f.default_factory is MISSING and name not in given:
            raise NoFieldError(f"{label}: {name} is missing; {cls.__name__} documents it")
