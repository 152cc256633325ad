"""Checks the JSON schemas of tools that come from outside: an agent, or a server of tools."""

from collections.abc import Mapping
from typing import Any


def tool_problem(tool: Any, where: str) -> str:
    """What is wrong with a tool, as `{"type": "function", "function": {"name": …, "parameters": …}}`, at a field
    below `where`; empty if nothing is. A chat template and the readers of calls may then use what it has without
    further checks."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        return f'{where}: must be {{"type": "function", "function": {{"name": …, "parameters": …}}}}'
    place, name = f"{where}.function", function.get("name")
    if not isinstance(name, str) or not name:
        return f"{place}.name: must be a text that is not empty"
    if not isinstance(function.get("description"), str | None):
        return f"{place}.description: must be a text"
    parameters = function.get("parameters")
    if parameters is None:
        return ""
    if not isinstance(parameters, dict):
        return f"{place}.parameters: must be an object, a JSON schema"
    if parameters.get("type", "object") != "object":
        return f"{place}.parameters.type: must be 'object'"
    return _schema_problem(parameters, f"{place}.parameters")


def _schema_problem(schema: Any, where: str) -> str:
    """What is wrong with the schema of a value, in the parts that a template or a reader of calls uses."""
    if not isinstance(schema, dict):
        return f"{where:.150}: must be an object, a JSON schema"
    kind = schema.get("type", "object")
    expected: Mapping[str, bool] = {
        "properties: must be an object": isinstance(schema.get("properties", {}), dict),
        "required: must be a list of texts": _is_texts(schema.get("required", [])),
        "type: must be a text, or a list of texts": isinstance(kind, str) or _is_texts(kind),
        "description: must be a text": isinstance(schema.get("description"), str | None),
        "enum: must be a list": isinstance(schema.get("enum", []), list),
        "anyOf: must be a list": isinstance(schema.get("anyOf", []), list),
    }
    for requirement, met in expected.items():
        if not met:
            return f"{where:.150}.{requirement}"
    inner = {f"properties.{name}": value for name, value in schema.get("properties", {}).items()}
    inner |= {f"anyOf.{i}": value for i, value in enumerate(schema.get("anyOf", []))}
    items = schema.get("items", True)
    of_items = {f"items.{i}": value for i, value in enumerate(items)} if isinstance(items, list) else {"items": items}
    inner |= {name: value for name, value in of_items.items() if not isinstance(value, bool)}
    return next(filter(None, (_schema_problem(value, f"{where}.{name}") for name, value in inner.items())), "")


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
