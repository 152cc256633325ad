"""Shell completion: recipes, files, and the fields and values of a recipe.

Fields and values come from `recipes/schema.json`, so that pressing Tab imports neither torch nor config classes.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from proxima.system.recipe_files import shipped_folder, shipped_recipes

Json = dict[str, Any]
FILES = (".yaml", ".jsonl", ".json", ".parquet", ".csv", ".gguf", ".py")
SLOTS = (
    "advantage aggregate algorithm correction critic divergence engine loss monitor optimizer penalty placement "
    "preference reference_engine reference_kl reward selection sets sharding surrogate task recipes schema"
)
WITH_LAWS = "surrogates corrections penalties aggregates distillations advantages selections rewards engines"
PLACES = ("path", "folder", "rollouts")  # fields that name a file or a folder


def complete_recipe(prefix: str, **_: object) -> list[str]:
    """Recipes that come with proxima, YAML files and folders."""
    return [*shipped_recipes(), *files(prefix, (".yaml",))]


def files(prefix: str, suffixes: tuple[str, ...] = FILES) -> list[str]:
    """Folders and files of these kinds in the folder that the prefix names."""
    start = Path(prefix if prefix.endswith("/") else Path(prefix).parent)
    return sorted(
        f"{path}/" if path.is_dir() else str(path)
        for path in start.glob("[!.]*")
        if path.is_dir() or path.suffix in suffixes
    )


def complete_override(prefix: str, **_: object) -> list[str]:
    """Complete a field, `algorithm.surrogate.delta=`, or a value, `algorithm=grpo`."""
    definitions = _definitions()
    field: Json = {"anyOf": [body for name, body in definitions.items() if name.startswith("recipes.")]}
    path, equals, value = prefix.partition("=")
    *parents, last = path.split(".")
    for name in [*parents, *([last] if equals else [])]:
        field = fields_below(field, definitions).get(name, {})
    if equals:
        places = files(value) if last in PLACES else []
        return [f"{path}={option}" for option in dict.fromkeys([*field_values(field, definitions), *places])]
    below = {name: child for name, child in fields_below(field, definitions).items() if name.startswith(last)}
    return list(fields("".join(f"{name}." for name in parents), below, definitions))


def fields(start: str, below: Json, definitions: Json) -> Iterator[str]:
    """Yield `path=` for a field with a value and `path.` for a section; for a section that is the only match, its
    fields instead."""
    for name, field in below.items():
        inner = fields_below(field, definitions)
        if inner and len(below) == 1:
            yield from [f"{start}{name}="] if any(field_values(field, definitions)) else []
            yield from fields(f"{start}{name}.", inner, definitions)
        else:
            yield f"{start}{name}." if inner else f"{start}{name}="


def alternatives(field: Json, definitions: Json) -> Iterator[Json]:
    """Yield the alternative schemas of a field, one of which applies."""
    if "$ref" in field:
        yield from alternatives(definitions[field["$ref"].rpartition("/")[2]], definitions)
    elif several := field.get("oneOf") or field.get("anyOf"):
        for alternative in several:
            yield from alternatives(alternative, definitions)
    else:
        yield field


def fields_below(field: Json, definitions: Json) -> Json:
    """The fields below a field, of all its alternatives; for a list, those of an entry are below its first index, 0."""
    children: dict[str, list[Json]] = {}
    for schema in alternatives(field, definitions):
        inner = {"0": schema["items"]} if "items" in schema and fields_below(schema["items"], definitions) else {}
        for name, child in {**schema.get("properties", {}), **inner}.items():
            children.setdefault(name, []).append(child)
    return {name: {"anyOf": several} for name, several in children.items() if name != "extends"}


def field_values(field: Json, definitions: Json) -> Iterator[str]:
    """The possible values of a field: its kinds or presets, `true` and `false`, its default."""
    for schema in alternatives(field, definitions):
        options: list[Any] = list(schema.get("enum", ()))
        if "items" in schema:
            yield from field_values(schema["items"], definitions)
        elif schema.get("type") in ("boolean", "null"):
            options = [True, False] if schema["type"] == "boolean" else [None]
        elif not options and isinstance(schema.get("default"), str | int | float):
            options = [schema["default"]]
        for option in options:
            yield option if isinstance(option, str) else json.dumps(option)


def complete_surrogate(prefix: str, **_: object) -> list[str]:
    return _kinds("surrogates")


def complete_slot(prefix: str, **_: object) -> list[str]:
    """The arguments of `proxima list`."""
    return SLOTS.split()


def complete_checked(prefix: str, **_: object) -> list[str]:
    """Kinds that have laws, and folders."""
    return [*(kind for table in WITH_LAWS.split() for kind in _kinds(table)), *files(prefix, ())]


def _kinds(table: str) -> list[str]:
    return [name.removeprefix(f"{table}.") for name in _definitions() if name.startswith(f"{table}.")]


def _definitions() -> Json:
    schema = json.loads((shipped_folder() / "schema.json").read_text(encoding="utf-8"))
    return dict(schema["definitions"])
