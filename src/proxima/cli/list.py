"""List every kind of every slot with its fields and defaults. SLOT: algorithm, surrogate, reward …; or a kind, cppo;
or recipes, to list those that come with proxima; or schema, to print the JSON schema of recipes. First line of a recipe
for editors:
# yaml-language-server: $schema=schema.json"""

import dataclasses
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from proxima.cli.output import AsJson, print_json, terminal_width, truncated
from proxima.cli.parameters import Argument
from proxima.data.errors import UserError, nearest, suggestion
from proxima.system.user_files import FILE, shipped_layouts, shipped_recipes

WIDTH = 100
SLOT = "one slot, or one kind, with fields; default: all slots, one line per kind"
OTHER_NAMES = {"preset": "algorithm", "presets": "algorithm"}


def list_kinds(slot: Annotated[str | None, Argument(SLOT)] = None, *, as_json: AsJson = False) -> None:
    """Print the kinds of every slot, those of one slot or of one name with their fields, the recipes, or their schema;
    UserError for an unknown name."""
    if slot == "recipes":
        return list_recipes(as_json=as_json)
    if slot == "schema":
        from proxima.config.json_schema import schema_text

        return print(schema_text(), end="")
    slots = catalogue()
    if slot is not None:
        slots = _named(slot.rpartition(".")[2], slots)
    if as_json:
        return print_json(slots)
    text = "\n\n".join(_text(name, facts, fields=slot is not None) for name, facts in slots.items())
    whole = slot is not None or terminal_width(sys.stdout) is None
    print("\n".join(_fitted(line, whole) for line in text.splitlines()))


def _named(name: str, slots: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The slot of this name or, if there is none, each slot that has a kind of this name, with that kind alone."""
    for slot in (name, OTHER_NAMES.get(name, name), name.removesuffix("s")):
        if slot in slots:
            return {slot: slots[slot]}
    holding = {slot: facts for slot, facts in slots.items() if name in facts["kinds"]}
    if holding:
        return {slot: facts | {"kinds": {name: facts["kinds"][name]}} for slot, facts in holding.items()}
    kinds = [kind for facts in slots.values() for kind in facts["kinds"]]
    known = [*slots, "recipes", "schema", *(kinds if nearest(name, kinds) else ())]
    raise UserError(f"no slot or kind {name!r}", remedy=suggestion(name, known))


def _fitted(line: str, whole: bool = True) -> str:
    """Fit a line to `WIDTH` columns, or the width of a narrower terminal: wrapped below its last column if `whole`,
    else cut."""
    width = min(WIDTH, terminal_width(sys.stdout) or WIDTH)
    if len(line) <= width or not whole:
        return truncated(line, width)
    gaps = [gap.end() for gap in re.finditer(r"\S {2,}", line) if gap.end() <= width // 2]
    indent = " " * (gaps[-1] if gaps else 6)
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False))


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
    from proxima.config.describe import first_sentence

    text = file.read_text(encoding="utf-8", errors="replace")
    lines = (line[1:].strip() for line in text.splitlines() if line.startswith("#"))
    return first_sentence(" ".join(line for line in lines if line and not line.startswith("yaml-language-server")))


def catalogue() -> dict[str, dict[str, Any]]:
    """slot → {paths, meaning, kinds: {kind: {summary, fields: {name: {default, help}}}}}, from the schema and the
    tables."""
    from proxima.config.describe import all_fields, fields_of, kinds_of
    from proxima.config.families import FAMILIES

    slots: dict[str, dict[str, Any]] = {}
    infos: dict[str, Any] = {}
    for family in FAMILIES.values():
        for path, info in all_fields(family.root):
            if info.slot or info.presets:
                infos.setdefault(path, info)
    names = {path.rpartition(".")[2] for path in infos}
    for path, info in [*infos.items()]:
        for cls in kinds_of(info.slot).values() if info.slot else ():
            inner = {f"{path}.{field.name}": field for field in fields_of(cls) if field.slot and not field.slot.many}
            infos |= {below: field for below, field in inner.items() if field.name not in names}
    for path, info in infos.items():
        name = path.rpartition(".")[2]
        paths = [*slots.get(name, {}).get("paths", []), path]
        slots[name] = {"paths": paths, "meaning": info.help, "kinds": _kinds(info)}
    return slots


def _kinds(info: Any) -> dict[str, Any]:
    from proxima.config.describe import fields_of, kinds_of, summary_of, table_of
    from proxima.config.presets import NOTES
    from proxima.config.scalars import in_one_line, to_json

    if info.presets is not None:
        presets = sorted(table_of(info.presets).items())
        notes = {name: f"{note}. " for name, note in NOTES.items()}
        return {name: {"summary": notes.get(name, "") + in_one_line(preset), "fields": {}} for name, preset in presets}
    kinds = {}
    for kind, cls in sorted(kinds_of(info.slot).items()):
        fields: dict[str, dict[str, Any]] = {}
        for field in fields_of(cls):
            required = field.default is dataclasses.MISSING
            value = (field.slot and field.slot.default) or field.default
            default = {"required": True} if required else {"default": to_json(value)}
            fields[field.name] = {**default, "help": field.help}
        valued = info.name == "advantage" and "value" in getattr(cls, "needs", ())
        summary = f"Needs `critic`. {summary_of(cls)}" if valued else summary_of(cls)
        kinds[kind] = {"summary": summary, "fields": fields}
    for name, specs in sorted(table_of(info.slot.presets).items()) if info.slot.presets else ():
        kinds[name] = {"summary": f"Preset: {' + '.join(map(repr, specs)) or 'no correction'}", "fields": {}}
    return kinds


def _text(name: str, slot: dict[str, Any], fields: bool) -> str:
    lines = [f"{name}    {slot['meaning']}    ({', '.join(slot['paths'])})"]
    width = max((len(kind) for kind in slot["kinds"]), default=0)
    for kind, facts in slot["kinds"].items():
        declared = facts["fields"]
        lines.append(f"  {kind:<{width}}  {facts['summary']}{'' if fields else _defaults(declared)}")
        if fields:
            lines.extend(_field_lines(declared))
    return "\n".join(lines)


def _values(fields: dict[str, Any]) -> dict[str, str]:
    from proxima.config.scalars import in_one_line

    return {n: "required" if "required" in fact else in_one_line(fact["default"]) for n, fact in fields.items()}


def _defaults(fields: dict[str, Any]) -> str:
    values = _values(fields)
    shown = ", ".join(name if "required" in fields[name] else f"{name}={value}" for name, value in values.items())
    return f"  ({shown})" if shown else ""


def _field_lines(fields: dict[str, Any]) -> Iterator[str]:
    values = _values(fields)
    width, value_width = (max(map(len, texts), default=0) for texts in (values, values.values()))
    for name, value in values.items():
        yield f"      {name:<{width}}  {value:<{value_width}}  {fields[name]['help']}".rstrip()


COMMAND = list_kinds
