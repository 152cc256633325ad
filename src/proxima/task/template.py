"""Fills templates, texts with names in braces, with the values of a row."""

import json
import math
from collections.abc import Mapping
from string import Formatter
from typing import Any

from proxima.data import FieldError, require

LITERAL_BRACE = "write a literal brace twice"


def template_fields(template: str, field: str) -> set[str]:
    """Return the names in the braces of a template; FieldError for an unclosed brace, or braces without a name."""
    try:
        names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise FieldError(field, template, f"is not a template: {error}", remedy=LITERAL_BRACE) from None
    named = all(names) and not any("[" in name for name in names)
    require(named, field, template, "must name a column in each pair of braces")
    return names


def require_question_template(template: str) -> None:
    """Raise `FieldError` unless the template has `{question}` and no other field."""
    fits = template_fields(template, "template") == {"question"}
    require(fits, "template", template, "must hold {question} and nothing else in braces", remedy=LITERAL_BRACE)


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Replace each `{name}` in the template by `look_up(values, name)`, or by nothing if that is null. KeyError if a
    name is absent."""
    pieces: list[str] = []
    for text, name, _, _ in Formatter().parse(template):
        pieces.append(text)
        value = None if name is None else look_up(values, name)
        if value is not None:
            pieces.append(as_text(value))
    return "".join(pieces)


def look_up(values: Mapping[str, Any], name: str) -> Any:
    """Return `values[name]`, or for `a.b` the value of `b` inside `a`; KeyError with the part of the name that is
    absent."""
    if name in values:
        return values[name]
    head, dot, rest = name.partition(".")
    if dot and isinstance(values.get(head), Mapping):
        return look_up(values[head], rest)
    raise KeyError(name)


def as_text(value: Any) -> str:
    """Return text unchanged, and anything else as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(to_json_value(value), ensure_ascii=False)


def without_nan(value: Any) -> Any:
    """Return the value with null in place of numbers that are not finite, by which tables and Python's JSON mark
    missing numbers."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_json_value(value: Any) -> Any:
    """Convert a value to JSON values: dates, decimals, bytes and numbers that are not finite become texts."""

    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(item) for item in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)
