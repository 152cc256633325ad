"""List every kind of every slot with its fields and defaults. SLOT: algorithm, surrogate, reward …; or recipes, to
list those that come with proxima."""

import argparse
import dataclasses
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from proxima.cli.output import print_json, terminal_width, truncated
from proxima.data.recipe_files import shipped_recipes

WIDTH = 100
OTHER_NAMES = {"preset": "algorithm", "presets": "algorithm"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("slot", nargs="?", help="one slot, with fields; default: all slots, one line per kind")
    parser.add_argument("--json", action="store_true", help="print everything for programs")


def run(arguments: argparse.Namespace) -> int:
    from proxima.config.problems import one_problem, suggestion

    if arguments.slot == "recipes":
        return _show_recipes(as_json=arguments.json)
    slots = catalogue()
    if arguments.slot is not None:
        name = arguments.slot.rpartition(".")[2]
        if name not in slots:
            name = OTHER_NAMES.get(name, name.removesuffix("s") if name.removesuffix("s") in slots else name)
        if name not in slots and (section := _section(name)):
            raise one_problem("slot", section, name, "command line")
        if name not in slots:
            raise one_problem("slot", suggestion(name, [*slots, "recipes"]), name, "command line")
        slots = {name: slots[name]}
    if arguments.json:
        print_json(slots)
        return 0
    text = "\n\n".join(_text(name, slot, fields=arguments.slot is not None) for name, slot in slots.items())
    whole = arguments.slot is not None or terminal_width(sys.stdout) is None
    print("\n".join(_fitted(line, whole) for line in text.splitlines()))
    return 0


def _fitted(line: str, whole: bool = True) -> str:
    """The line in at most `WIDTH` columns, and no more than a terminal has: wrapped below its last column if `whole`,
    else cut."""
    width = min(WIDTH, terminal_width(sys.stdout) or WIDTH)
    if len(line) <= width or not whole:
        return truncated(line, width)
    gaps = [gap.end() for gap in re.finditer(r"\S {2,}", line) if gap.end() <= width // 2]
    indent = " " * (gaps[-1] if gaps else 6)
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False))


def _section(name: str) -> str | None:
    """What to do for the fields of a section such as `sft`, which is no slot."""
    from proxima.config.describe import fields_of
    from proxima.config.families import FAMILIES

    for command, family in FAMILIES.items():
        if name in {info.name for info in fields_of(family.root) if info.section} | {"lora"}:
            recipe = "quickstart" if command == "train" else f"cpu/{command}"
            return f"is a section and no slot: its fields are in docs/reference.md, and in `proxima explain {recipe}`"
    return None


def _show_recipes(as_json: bool) -> int:
    """A line a recipe: its name, and the first sentence of its comments."""
    found = {name: _first_sentence(file) for name, file in shipped_recipes().items()}
    if as_json:
        print_json(found)
        return 0
    longest = max(map(len, found))
    for path, comment in found.items():
        print(_fitted(f"{path:<{longest}}  {comment}".rstrip()))
    return 0


def _first_sentence(file: Path) -> str:
    from proxima.config.describe import first_sentence

    text = file.read_text(encoding="utf-8", errors="replace")
    lines = (line[1:].strip() for line in text.splitlines() if line.startswith("#"))
    return first_sentence(" ".join(line for line in lines if line and not line.startswith("yaml-language-server")))


def catalogue() -> dict[str, dict[str, Any]]:
    """slot → {path, meaning, kinds: {kind: {summary, fields: {name: {default, help}}}}}, made from the schema and the
    tables."""
    from proxima.config.families import FAMILIES

    found: dict[str, dict[str, Any]] = {}
    slots: dict[str, Any] = {}
    for family in FAMILIES.values():
        for path, info in _slots(family.root):
            slots.setdefault(path, info)
    for path, info in slots.items():
        name = path.rpartition(".")[2]
        paths = [*found.get(name, {}).get("paths", []), path]
        found[name] = {"paths": paths, "meaning": info.help, "kinds": _kinds(info)}
    return found


def _slots(cls: type, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and description of each slot below a config."""
    from proxima.config.describe import fields_of

    for info in fields_of(cls):
        if info.slot or info.presets:
            yield path + info.name, info
        if info.section is not None:
            yield from _slots(info.section, f"{path}{info.name}.")


def _kinds(info: Any) -> dict[str, Any]:
    from proxima.config.describe import fields_of, kinds_of, summary_of, table_of
    from proxima.config.presets import NOTES
    from proxima.config.scalars import to_json

    if info.presets is not None:
        presets = sorted(table_of(info.presets.table).items())
        notes = {name: f"{note}. " for name, note in NOTES.items()}
        return {name: {"summary": notes.get(name, "") + _slots_of(preset), "fields": {}} for name, preset in presets}
    kinds = {}
    for kind, cls in sorted(kinds_of(info.slot).items()):
        fields: dict[str, dict[str, Any]] = {}
        for field in fields_of(cls):
            required = field.default is dataclasses.MISSING
            value = field.default if field.default is not None or field.slot is None else field.slot.default
            default = {"required": True} if required else {"default": to_json(value)}
            fields[field.name] = {**default, "help": field.help}
        valued = info.name == "advantage" and "value" in getattr(cls, "needs", ())
        summary = f"Needs `critic`. {summary_of(cls)}" if valued else summary_of(cls)
        kinds[kind] = {"summary": summary, "fields": fields}
    for name, specs in sorted(table_of(info.slot.presets).items()) if info.slot.presets else ():
        kinds[name] = {"summary": f"Preset: {' + '.join(map(repr, specs)) or 'no correction'}", "fields": {}}
    return kinds


def _slots_of(preset: dict[str, Any]) -> str:
    """`ppo_clip, advantage grpo, aggregate token_mean`: a preset in one line."""
    from proxima.config.scalars import in_one_line

    def shown(spec: Any) -> str:
        if isinstance(spec, list):
            return "[" + ", ".join(shown(one) for one in spec) + "]"
        if not isinstance(spec, dict):
            return str(spec)
        rest = {key: value for key, value in spec.items() if key != "kind"}
        return " ".join([*([str(spec["kind"])] if "kind" in spec else []), *([in_one_line(rest)] if rest else [])])

    return "; ".join(f"{slot} {shown(spec)}" for slot, spec in preset.items())


def _text(name: str, slot: dict[str, Any], fields: bool) -> str:
    lines = [f"{name}    {slot['meaning']}    ({', '.join(slot['paths'])})"]
    width = max((len(kind) for kind in slot["kinds"]), default=0)
    for kind, facts in slot["kinds"].items():
        lines.append(f"  {kind:<{width}}  {facts['summary']}{'' if fields else _defaults(facts['fields'])}")
        if fields:
            lines.extend(_field_lines(facts["fields"]))
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
