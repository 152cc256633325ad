"""Converts Python values in recipes and overrides to the texts of a command line."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

from proxima.config.describe import kind_of
from proxima.config.problems import ConfigError
from proxima.config.scalars import for_any_reader
from proxima.config.tree import COMMAND_LINE
from proxima.data import UserError

Overrides = Sequence[str] | Mapping[str, Any]


def override_texts(overrides: Overrides) -> list[str]:
    """Convert overrides to `key=value` texts, as on the command line.

    Raises:
        UserError: they are neither texts nor a mapping, or a value can't be written to a recipe.
    """
    if isinstance(overrides, Mapping):
        return [f"{key}={for_any_reader(plain(value, str(key)))}" for key, value in overrides.items()]
    if isinstance(overrides, str) or not all(isinstance(text, str) for text in overrides):
        raise UserError(f"overrides={overrides!r} must be a list of 'key=value' texts, or a mapping")
    return list(overrides)


def expand_user(value: Any) -> Any:
    """Expand a leading `~` of a text or path, as a shell does; other values are unchanged."""
    if isinstance(value, str | Path):
        return os.path.expanduser(value)
    return value


def plain(value: Any, key: str = "recipe") -> Any:
    """Convert a Python value to plain YAML: a spec becomes its kind and fields, a class or function its reference.

    Raises:
        UserError: the value has no such form, or its class or function is not in an importable module.
    """
    if isinstance(value, Mapping):
        return {str(name): plain(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, key) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, type):
        return _reference(value, key)
    if isinstance(value, FunctionType):
        place = _reference(value, key)
        if key == "path":
            return place
        return {"kind": "function", "path": place}
    if is_dataclass(value):
        _reference(type(value), key)
        return {
            "kind": kind_of(value),
            **{field.name: plain(getattr(value, field.name), field.name) for field in fields(value) if field.init},
        }
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if hasattr(value, "item"):  # a number of numpy
        return value.item()
    what = "give a number, a text, a list, a mapping, a spec, or a class or function of a module"
    raise UserError(f"{key}: a {type(value).__name__} can't stand in a recipe", remedy=what)


def _reference(value: Any, key: str) -> str:
    """`package.module:name`, by which worker processes and a resume import the class or function again."""
    if value.__module__ == "__main__" or "<" in value.__qualname__:
        reason = f"{key}: {value.__name__} is defined in the notebook, script or function that is running"
        how = "%%writefile my_code.py in a notebook's cell, then `from my_code import` it"
        raise UserError(
            f"{reason}, where worker processes and a resume can't find it", remedy=f"write it to a module: {how}"
        )
    return f"{value.__module__}:{value.__qualname__}"


@contextmanager
def overrides_named() -> Iterator[None]:
    """Make config errors name `overrides` as the source instead of the command line."""
    try:
        yield
    except ConfigError as error:
        problems = []
        for problem in error.problems:
            if problem.source == COMMAND_LINE.text:
                problem = replace(problem, source="overrides")
            problems.append(problem)
        raise ConfigError(problems) from None
