"""A JSON schema (draft 7) of recipes, for editors: completion, help on hover, a red line under invalid values.

Generated from the dataclasses and the tables of kinds, without the checks of `__post_init__`. `recipes/schema.json` is
its output.
"""

import collections.abc
import json
import math
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from proxima.config.describe import FieldInfo, fields_of, kinds_of, options_of, summary_of, table_of
from proxima.config.families import FAMILIES, OFFLINE
from proxima.config.scalars import to_json
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
    chosen: Json = {"allOf": [references["train"], {"required": ["model", "task", "reward", "algorithm"]}]}
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
        if info.default is not MISSING and not (isinstance(default, float) and not math.isfinite(default)):
            schema["default"] = default
    return {**schema, **({"description": info.help} if info.help else {})}


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
    return {"oneOf": [{"type": "array", "items": entry}, *options]} if slot.many else entry


def _spec(cls: type, names: list[str], definitions: Json) -> Json:
    body = _object(cls, definitions)
    body["properties"] = {"kind": {"enum": names}, **body["properties"]}
    return {**body, "required": ["kind"], "description": summary_of(cls)}


_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", Path: "string"}


def _type(hint: Any) -> Json:
    options = options_of(hint)
    if len(options) > 1:
        return {"anyOf": [_type(option) for option in options]}
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(args)}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    base = origin or hint
    if base is tuple and args and args[-1] is not Ellipsis:
        return {"type": "array", "items": [_type(arg) for arg in args], "minItems": len(args), "maxItems": len(args)}
    if base in (tuple, list, collections.abc.Sequence, collections.abc.Iterable):
        return {"type": "array", "items": _type(args[0]) if args else {}}
    if base in (dict, collections.abc.Mapping):
        return {"type": "object", "additionalProperties": _type(args[1]) if len(args) == 2 else True}
    return {}
