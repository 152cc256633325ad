"""List the kinds of every slot. SLOT: algorithm, surrogate, reward … shows its kinds with their fields; a kind, cppo,
that kind; recipes, those that come with proxima; schema, the JSON schema of recipes, for editors. They read it for a
recipe whose first line is
# yaml-language-server: $schema=schema.json"""

import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from proxima.cli.parameters import Argument, AsJson, print_json, truncated
from proxima.cli.prose import WIDTH
from proxima.config import json_schema
from proxima.config.describe import first_sentence
from proxima.config.scalars import in_one_line
from proxima.data.errors import UserError, nearest, suggestion
from proxima.system.user_files import FILE, shipped_layouts, shipped_recipes
from proxima.view.formatting import output_width

SLOT = "one slot, or one kind, with fields; default: the names of all kinds"
OTHER_NAMES = {"preset": "algorithm", "presets": "algorithm"}


def list_kinds(
    slot: Annotated[str | None, Argument(SLOT)] = None,
    *,
    everything: Annotated[bool, Argument("a line for each kind, with its defaults", flag="--all")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the names of all kinds, the kinds of one slot or of one name with their fields, the recipes, or their
    schema; UserError for an unknown name."""
    if slot == "recipes":
        return list_recipes(as_json=as_json)
    if slot == "schema":
        return print(json_schema.schema_text(), end="")
    slots = json_schema.catalogue()
    if slot is not None:
        slots = _named(slot.rpartition(".")[2], slots)
    if as_json:
        return print_json(slots)
    if slot is None and not everything:
        return print("\n".join(_names(slots)))
    text = "\n\n".join(_text(name, facts, fields=slot is not None) for name, facts in slots.items())
    whole = slot is not None or output_width(sys.stdout) is None
    print("\n".join(_fitted(line, whole) for line in text.splitlines()))


def _names(slots: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A line or more for each slot, then what shows more."""
    width = max(map(len, slots))
    columns = min(WIDTH, output_width(sys.stdout) or WIDTH)
    for name, facts in slots.items():
        kinds = ", ".join(facts["kinds"])
        first = f"{name:<{width}}  "
        indent = " " * (width + 2)
        lines = textwrap.wrap(kinds, columns, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
        yield from lines or [name]
    yield "\nproxima list SLOT or KIND: what each does, with its fields; recipes: those that come with proxima"


def _named(name: str, slots: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The slot of this name or, if there is none, each slot that has a kind of this name, with that kind alone."""
    for slot in (name, OTHER_NAMES.get(name, name), name.removesuffix("s")):
        if slot in slots:
            return {slot: slots[slot]}
    holding = {slot: facts for slot, facts in slots.items() if name in facts["kinds"]}
    if holding:
        return {slot: facts | {"kinds": {name: facts["kinds"][name]}} for slot, facts in holding.items()}
    kinds = list(chain.from_iterable(facts["kinds"] for facts in slots.values()))
    known = [*slots, "recipes", "schema"]
    if nearest(name, kinds):
        known += kinds
    raise UserError(f"no slot or kind {name!r}", remedy=suggestion(name, known))


def _fitted(line: str, whole: bool = True) -> str:
    """Fit a line to `WIDTH` columns, or the width of a narrower terminal: wrapped below its last column if `whole`,
    else cut."""
    width = min(WIDTH, output_width(sys.stdout) or WIDTH)
    if len(line) <= width or not whole:
        return truncated(line, width)
    gaps = [gap.end() for gap in re.finditer(r"\S {2,}", line) if gap.end() <= width // 2]
    column = gaps[-1] if gaps else 6
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=" " * column, break_on_hyphens=False))


def list_recipes(*, as_json: bool = False) -> None:
    """Print a line per recipe: its name and the first sentence of its comments; then the layouts to lay over one."""
    files = shipped_recipes() | {f"{FILE}{name}": file for name, file in shipped_layouts().items()}
    comments = {name: _first_sentence(file) for name, file in files.items()}
    if as_json:
        return print_json(comments)
    longest = max(map(len, comments))
    for path, comment in comments.items():
        print(_fitted(f"{path:<{longest}}  {comment}".rstrip()))


def _first_sentence(file: Path) -> str:
    text = file.read_text(encoding="utf-8", errors="replace")
    lines = (line[1:].strip() for line in text.splitlines() if line.startswith("#"))
    return first_sentence(" ".join(line for line in lines if line and not line.startswith("yaml-language-server")))


def _text(name: str, slot: dict[str, Any], fields: bool) -> str:
    lines = [f"{name}    {slot['meaning']}    ({', '.join(slot['paths'])})"]
    width = max((len(kind) for kind in slot["kinds"]), default=0)
    for kind, facts in slot["kinds"].items():
        declared = facts["fields"]
        line = f"  {kind:<{width}}  {facts['summary']}"
        if fields:
            lines += [line, *_field_lines(declared)]
        else:
            lines.append(line + _defaults(declared))
    return "\n".join(lines)


def _defaults(fields: dict[str, Any]) -> str:
    shown = []
    for name, fact in fields.items():
        if "required" in fact:
            shown.append(name)
        else:
            shown.append(f"{name}={in_one_line(fact['default'])}")
    return f"  ({', '.join(shown)})" if shown else ""


def _field_lines(fields: dict[str, Any]) -> Iterator[str]:
    values: dict[str, str] = {}
    for name, fact in fields.items():
        values[name] = "required" if "required" in fact else in_one_line(fact["default"])
    width = max(map(len, values), default=0)
    value_width = max(map(len, values.values()), default=0)
    for name, value in values.items():
        yield f"      {name:<{width}}  {value:<{value_width}}  {fields[name]['help']}".rstrip()


COMMAND = list_kinds
