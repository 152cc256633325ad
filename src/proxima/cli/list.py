"""Show every kind in every slot with its fields and defaults. SLOT: algorithm, surrogate, reward, task …"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from proxima.cli.common import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("slot", nargs="?", help="one slot only; none: all of them, a line a kind")
    parser.add_argument("--json", action="store_true", help="print everything for programs")


def run(arguments: argparse.Namespace) -> int:
    from proxima.config.errors import one_problem, suggestion

    slots = catalogue()
    if arguments.slot is not None:
        name = arguments.slot.rpartition(".")[2]
        if name not in slots:
            raise one_problem("slot", suggestion(name, slots), name, "command line")
        slots = {name: slots[name]}
    if arguments.json:
        print_json(slots)
        return 0
    from proxima.config.explain import cut, terminal_width

    width = None if arguments.slot else terminal_width(sys.stdout)
    text = "\n\n".join(_text(name, slot, fields=arguments.slot is not None) for name, slot in slots.items())
    print("\n".join(line if width is None else cut(line, width) for line in text.splitlines()))
    return 0


def catalogue() -> dict[str, dict[str, Any]]:
    """slot → {path, meaning, kinds: {kind: {summary, fields: {name: {default, help}}}}}, made from the schema and the tables."""
    found: dict[str, dict[str, Any]] = {}
    for path, info in _slots():
        name = path.rpartition(".")[2]
        paths = [*found.get(name, {}).get("paths", []), path]
        found[name] = {"paths": paths, "meaning": info.help, "kinds": _kinds(info)}
    return found


def _slots() -> Iterator[tuple[str, Any]]:
    from proxima.config.describe import dataclass_in, fields_of
    from proxima.config.schema import RunConfig

    def walk(cls: type, path: str) -> Iterator[tuple[str, Any]]:
        for info in fields_of(cls):
            inner = dataclass_in(info.hint)
            if info.slot or info.presets:
                yield path + info.name, info
            if inner is not None:
                yield from walk(inner, f"{path}{info.name}.")

    yield from walk(RunConfig, "")


def _kinds(info: Any) -> dict[str, Any]:
    from proxima.config.check import beyond_the_loop
    from proxima.config.describe import fields_of, kinds_of, summary_of, table_of
    from proxima.config.resolve import plain

    if info.presets is not None:
        return {name: {"summary": _slots_of(preset), "fields": {}} for name, preset in sorted(table_of(info.presets.table).items())}
    kinds = {}
    for kind, cls in sorted(kinds_of(info.slot).items()):
        fields: dict[str, dict[str, Any]] = {}
        for field in fields_of(cls):
            default = {"required": True} if field.default is dataclasses.MISSING else {"default": plain(field.default)}
            fields[field.name] = {**default, "help": field.help}
        only = beyond_the_loop(cls) if info.name == "advantage" else None
        kinds[kind] = {"summary": f"In core only, it {only}. {summary_of(cls)}" if only else summary_of(cls), "fields": fields}
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


def _defaults(fields: dict[str, Any]) -> str:
    from proxima.config.scalars import in_one_line

    shown = ", ".join(name if "required" in fact else f"{name}={in_one_line(fact['default'])}" for name, fact in fields.items())
    return f"  ({shown})" if shown else ""


def _field_lines(fields: dict[str, Any]) -> Iterator[str]:
    from proxima.config.scalars import in_one_line

    width = max((len(name) for name in fields), default=0)
    values = {name: "required" if "required" in fact else in_one_line(fact["default"]) for name, fact in fields.items()}
    value_width = max((len(value) for value in values.values()), default=0)
    for name, fact in fields.items():
        yield f"      {name:<{width}}  {values[name]:<{value_width}}  {fact['help']}".rstrip()
