"""Parses the tool calls in a model's text, and describes how to write them if the chat template has no tools.

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>     Hermes, Qwen2.5, Qwen3, SmolLM3 …
    llama    {"name": "add", "parameters": {"a": 1}}, or a list of them        Llama 3, Mistral before v11, Phi-4-mini …
    glm      <tool_call>add <arg_key>a</arg_key><arg_value>1</arg_value></tool_call>    GLM 4.5 and later
    mistral  [TOOL_CALLS]add[ARGS]{"a": 1}                                     Mistral from v11 on
    deepseek <｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>       DeepSeek V3.1; V3 and R1 in a fence
    kimi     <|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>       Kimi K2
    minimax  <invoke name="add"><parameter name="a">1</parameter></invoke>     MiniMax M2
    xml      <function=add><parameter=a>1</parameter></function>               Qwen3-Coder; templates without tools
    code     a fenced block, with the tool's name after the fence              templates without tools

`format_of` chooses the format of a chat template.

Any text can be parsed without raising: an invalid call is reported in one line.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from proxima.data.episode import ToolCall
from proxima.environment.call_readers import (
    MOST_CALLS,
    STARTS,
    Parameters,
    ReadMessage,
    ToolFormat,
    mistral_start,
    read_calls,
    tag_start,
)
from proxima.environment.template_format import format_of

__all__ = [
    "MOST_CALLS",
    "Parameters",
    "ReadMessage",
    "ToolFormat",
    "before_calls",
    "describe_tools",
    "format_of",
    "parameters_of",
    "read_calls",
    "write_call",
]


def parameters_of(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schema of each tool's parameters, by the tool's name."""
    return {schema["function"]["name"]: schema["function"].get("parameters") or {} for schema in schemas}


def before_calls(text: str, tool_format: ToolFormat, tools: Parameters) -> str:
    """The part of a message that precedes its first call."""
    marks = {"hermes": "<tool_call>", "glm": "<tool_call>", "xml": "<function=", "code": "```", "llama": "{"}
    if tool_format in STARTS:
        at = tag_start(text, tool_format, tools)
    else:
        at = mistral_start(text, tools) if tool_format == "mistral" else text.find(marks[tool_format])
    return text if at < 0 else text[:at].rstrip()


def describe_tools(schemas: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    """Return the text for the system message that describes the tools if the template can't."""
    tools = parameters_of(schemas)
    lines = ["You can use these tools:", *(_described(schema["function"], tools) for schema in schemas)]
    name, parameters = next(iter(tools.items()))
    call = ToolCall(name=name, arguments=dict.fromkeys(parameters.get("properties", {}), "..."))
    lines += ["To use one, write, for example:", write_call(call, tool_format, tools)]
    return "\n".join([*lines, "The result is in the next message."])


def _described(function: Mapping[str, Any], tools: Parameters) -> str:
    properties = tools[function["name"]].get("properties", {})
    signature = ", ".join(f"{name}: {_type_name(schema)}" for name, schema in properties.items())
    about = [f"  {name}: {schema['description']}" for name, schema in properties.items() if schema.get("description")]
    description = " ".join((function.get("description") or "").split())
    return "\n".join([f"- {function['name']}({signature}): {description}", *about])


def _type_name(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    named = schema.get("type", "any")
    return named if isinstance(named, str) else " or ".join(named)


def write_call(call: ToolCall, tool_format: ToolFormat, tools: Parameters) -> str:
    """Return a call as the model would write it."""
    arguments = dict(call.arguments)
    if tool_format == "hermes":
        return f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': arguments})}\n</tool_call>"
    if tool_format == "llama":
        return json.dumps({"name": call.name, "parameters": arguments})
    if tool_format == "mistral":
        return f"[TOOL_CALLS]{call.name}[ARGS]{json.dumps(arguments)}"
    if tool_format == "deepseek":
        body = f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"
    if tool_format == "kimi":
        body = f"functions.{call.name}:0<|tool_call_argument_begin|>{json.dumps(arguments)}"
        return f"<|tool_calls_section_begin|><|tool_call_begin|>{body}<|tool_call_end|><|tool_calls_section_end|>"
    values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
    if tool_format == "minimax":
        inside = "".join(f'<parameter name="{name}">{value}</parameter>\n' for name, value in values.items())
        return f'<minimax:tool_call>\n<invoke name="{call.name}">\n{inside}</invoke>\n</minimax:tool_call>'
    if tool_format == "glm":
        pairs = (f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n" for name, value in values.items())
        return f"<tool_call>{call.name}\n{''.join(pairs)}</tool_call>"
    if tool_format == "code":
        bare = f"```{call.name}\n{next(iter(arguments.values()), None)}\n```"
        read_back = read_calls(bare, "code", tools) == ReadMessage((call,))
        return bare if read_back else f"```{call.name}\n{json.dumps(arguments)}\n```"
    inside = "".join(f"<parameter={name}>{value}</parameter>\n" for name, value in arguments.items())
    return f"<function={call.name}>\n{inside}</function>"
