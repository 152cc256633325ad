"""Scalars of recipes: read as YAML 1.2, which is what people mean, and written so that all YAML readers agree.

`1e-5` is a number; `on`, `yes` and `12:30` are texts; `_` may separate digits. A text that some reader would take for
something else is quoted.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from proxima.data.errors import safe_repr
from proxima.data.json_reader import MAX_DIGITS

_TAG = "tag:yaml.org,2002:"
_PATTERNS = (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        r"^(?:[-+]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+0123456789."),
    ),
    ("merge", r"^<<$", ["<"]),
)


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2. Tags are refused: a value is what it looks like."""

    converted = 0  # nodes read so far
    stand_ins: frozenset[int] = frozenset()  # lines whose comment marks a value as still to be filled in

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  PyYAML reads this class attribute

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # it has no types
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            what = f"the tag {event.tag!r} has no meaning here; leave it out"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=event.start_mark)  # type: ignore[arg-type]  # of C, or not
        return super().compose_node(parent, index)


class Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes texts that either version of YAML would read as something else."""


for _name, _pattern, _first in _PATTERNS:
    Loader.add_implicit_resolver(_TAG + _name, re.compile(_pattern), _first)
    Dumper.add_implicit_resolver(_TAG + _name, re.compile(_pattern), _first)


def _construct_int(loader: Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    if len(text) > MAX_DIGITS:
        said = f"a number of {len(text):,} digits, at most {MAX_DIGITS} can be read"
        raise yaml.MarkedYAMLError(problem=said, problem_mark=node.start_mark)
    base = 16 if "0x" in text else 10
    return int(text, base)


Loader.add_constructor(_TAG + "int", _construct_int)


def to_json(value: object) -> Any:
    """A field's value in JSON types: tuples become lists, paths texts, and a section a mapping of its fields."""
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def in_one_line(value: object) -> str:
    """A plain value as YAML in one line, numbers as people write them: `1e-05`, `0.15`, `1`."""
    if isinstance(value, float):
        if math.isfinite(value):
            return f"{value:.15g}"
        return str(value).replace("inf", ".inf").replace("nan", ".nan")
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value, ensure_ascii=False)  # any other style would spread it over several lines
    if isinstance(value, int) and not isinstance(value, bool):
        return safe_repr(value)
    style: Any = {"default_flow_style": True, "width": math.inf, "allow_unicode": True, "sort_keys": False}
    try:
        return str(yaml.dump(value, Dumper=Dumper, **style)).removesuffix("\n").removesuffix("\n...")
    except ValueError:  # an integer inside it has thousands of digits
        return safe_repr(value)


def for_any_reader(value: object) -> str:
    """As `in_one_line`, but with every digit, and with a point in `1.0e-05`, without which YAML 1.1 reads a text."""
    if isinstance(value, float) and math.isfinite(value):
        return re.sub(r"^(-?\d+)(e|$)", r"\1.0\2", repr(value))
    return in_one_line(value)
