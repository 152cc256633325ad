"""What recipes may hold, from the dataclasses and the tables of kinds: a JSON schema (draft 7) for editors, which gives
completion, help on hover and a red line under invalid values; and the catalogue of kinds of `proxima list`.

The schema is without the checks of `__post_init__`. `recipes/schema.json` is its output.
"""

import collections.abc
import json
import math
from collections.abc import Iterator
from dataclasses import MISSING
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from proxima.config.describe import FieldInfo, all_fields, fields_of, kinds_of, options_of, summary_of, table_of
from proxima.config.families import FAMILIES, OFFLINE
from proxima.config.presets import NOTES
from proxima.config.scalars import in_one_line, to_json
from proxima.data.kinds import Slot

Json = dict[str, Any]
ELSEWHERE = "^[A-Za-z_][\\w.]*:[A-Za-z_]\\w*$"  # package.module:Class


def schema_text() -> str:
    """The schema as `recipes/schema.json` has it."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def json_schema() -> Json:
    """The schema of a recipe file. A recipe that extends another may leave anything out."""
    definitions: Json = {}
    extends = {"type": "string", "description": "a recipe that this one changes; relative to it"}
    for name, family in FAMILIES.items():
        body = _object(family.root, definitions)
        body["properties"] = {"extends": extends, **body["properties"]}
        definitions[f"recipes.{name}"] = {**body, "description": summary_of(family.root)}
    references = {name: {"$ref": f"#/definitions/recipes.{name}"} for name in FAMILIES}
    mix = {"type": "object", "properties": {"kind": {"const": "mix"}}, "required": ["kind"]}
    scored = {"anyOf": [{"required": ["reward"]}, {"properties": {"task": mix}}]}  # sources of a mix may have their own
    chosen: Json = {"allOf": [references["train"], {"required": ["model", "task", "algorithm"]}, scored]}
    for family in OFFLINE:
        root_schema = {"allOf": [references[family.name], {"required": ["model", "task"]}]}
        chosen = {"if": {"required": [family.own]}, "then": root_schema, "else": chosen}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "proxima recipe",
        "type": "object",
        "if": {"required": ["extends"]},
        "then": {"anyOf": list(references.values())},
        "else": chosen,
        "definitions": definitions,
    }


def _object(cls: type, definitions: Json) -> Json:
    properties = {info.name: _field(info, definitions) for info in fields_of(cls)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _field(info: FieldInfo, definitions: Json) -> Json:
    if info.slot is not None:
        schema = _slot(info, info.slot, definitions)
    elif info.section is not None:
        schema = _section(info, info.section, definitions)
    else:
        schema = _type(info.hint)
        default = to_json(info.default)
        is_number = not isinstance(default, float) or math.isfinite(default)  # JSON has no infinity
        if info.default is not MISSING and is_number:
            schema["default"] = default
    if info.help:
        schema = {**schema, "description": info.help}
    return schema


def _section(info: FieldInfo, inner: type, definitions: Json) -> Json:
    body = _object(inner, definitions)
    if info.presets is not None:
        names = sorted(table_of(info.presets))
        meaning = "a published setting; the other fields change it"
        body["properties"]["preset"] = {"enum": [*names, None], "description": meaning}
        return {"oneOf": [{"enum": names}, body]}
    return {"oneOf": [body, {"type": "null"}]}


def _slot(info: FieldInfo, slot: Slot, definitions: Json) -> Json:
    kinds = kinds_of(slot)
    aliases = table_of(slot.aliases) if slot.aliases else {}
    presets = table_of(slot.presets) if slot.presets else {}
    options: list[Json] = [
        {"enum": sorted([*kinds, *aliases, *presets])},
        {"type": "string", "pattern": ELSEWHERE, "description": "package.module:Class, a spec of your own"},
        {"type": "object", "properties": {"kind": {"type": "string", "pattern": ELSEWHERE}}, "required": ["kind"]},
        {
            "type": "object",
            "not": {"required": ["kind"]},
            "description": "fields over the preset or the extended recipe",
        },
    ]
    for kind, cls in sorted(kinds.items()):
        name = f"{slot.table.rpartition(':')[2].lower()}.{kind}"
        names = [kind, *sorted(alias for alias, meant in aliases.items() if meant == kind)]
        if name not in definitions:
            definitions[name] = {}  # ends the recursion: a mix of tasks holds tasks
            definitions[name] = _spec(cls, names, definitions)
        options.append({"$ref": f"#/definitions/{name}"})
    if info.default is slot.default is None:
        options.append({"type": "null"})
    entry: Json = {"oneOf": options}
    if slot.many:
        return {"oneOf": [{"type": "array", "items": entry}, *options]}
    return entry


def _spec(cls: type, names: list[str], definitions: Json) -> Json:
    body = _object(cls, definitions)
    body["properties"] = {"kind": {"enum": names}, **body["properties"]}
    return {**body, "required": ["kind"], "description": summary_of(cls)}


_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", Path: "string"}


def _type(hint: object) -> Json:
    options = options_of(hint)
    if len(options) > 1:
        return {"anyOf": [_type(option) for option in options]}
    origin = get_origin(hint)
    args = get_args(hint)
    if origin is Literal:
        return {"enum": list(args)}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    base = origin or hint
    if base is tuple and args and args[-1] is not Ellipsis:
        return {"type": "array", "items": [_type(arg) for arg in args], "minItems": len(args), "maxItems": len(args)}
    if base in (tuple, list, collections.abc.Sequence, collections.abc.Iterable):
        items = _type(args[0]) if args else {}
        return {"type": "array", "items": items}
    if base in (dict, collections.abc.Mapping):
        values = _type(args[1]) if len(args) == 2 else True
        return {"type": "object", "additionalProperties": values}
    return {}


def catalogue() -> dict[str, dict[str, Any]]:
    """slot → {paths, meaning, kinds: {kind: {summary, fields: {name: {default, help}}}}}, from the schema and the
    tables."""
    slots: dict[str, dict[str, Any]] = {}
    infos: dict[str, Any] = {}
    for family in FAMILIES.values():
        for path, info in all_fields(family.root):
            if info.slot or info.presets:
                infos.setdefault(path, info)
    names = {path.rpartition(".")[2] for path in infos}
    for path, info in list(infos.items()):
        if info.slot is None:
            continue
        for cls in kinds_of(info.slot).values():
            for field in fields_of(cls):
                if field.slot and not field.slot.many and field.name not in names:
                    infos[f"{path}.{field.name}"] = field
    for path, info in infos.items():
        name = path.rpartition(".")[2]
        paths = [*slots.get(name, {}).get("paths", []), path]
        slots[name] = {"paths": paths, "meaning": info.help, "kinds": _catalogued(info)}
    return slots


def _catalogued(info: Any) -> dict[str, Any]:
    if info.presets is not None:
        presets = sorted(table_of(info.presets).items())
        shown = {}
        for name, preset in presets:
            note = f"{NOTES[name]}. " if name in NOTES else ""
            shown[name] = {"summary": note + in_one_line(preset), "fields": {}}
        return shown
    kinds = {}
    for kind, cls in sorted(kinds_of(info.slot).items()):
        fields: dict[str, dict[str, Any]] = {}
        for path, field in _fields_of_kind(cls):
            if field.default is MISSING:
                fields[path] = {"required": True, "help": field.help}
            else:
                value = (field.slot and field.slot.default) or field.default
                fields[path] = {"default": to_json(value), "help": field.help}
        summary = summary_of(cls)
        if info.name == "advantage" and "value" in getattr(cls, "needs", ()):
            summary = f"Needs `critic`. {summary}"
        kinds[kind] = {"summary": summary, "fields": fields}
    if info.slot.presets:
        for name, specs in sorted(table_of(info.slot.presets).items()):
            parts = " + ".join(map(repr, specs)) or "no correction"
            kinds[name] = {"summary": f"Preset: {parts}", "fields": {}}
    return kinds


def _fields_of_kind(cls: type) -> Iterator[tuple[str, FieldInfo]]:
    """The fields of a kind and of its sections, by their paths. Sections that recipes also have elsewhere are not
    opened: their fields are listed there. A section that is not null by default is described by its fields alone."""
    elsewhere = _sections_of_recipes()
    for path, info in all_fields(cls):
        opened = info.section is not None and info.section not in elsewhere
        if info.owner not in elsewhere and (not opened or info.default is None):
            yield path, info


@cache
def _sections_of_recipes() -> frozenset[type]:
    """The classes of the sections of all families."""
    sections = set[type]()
    for family in FAMILIES.values():
        sections |= {info.section for _, info in all_fields(family.root) if info.section is not None}
    return frozenset(sections)
