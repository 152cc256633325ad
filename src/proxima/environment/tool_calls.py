"""Parses the tool calls in a model's text, and describes how to write them if the chat template has no tools.

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>     Hermes, Qwen2.5, Qwen3, SmolLM3 …
    llama    {"name": "add", "parameters": {"a": 1}}                           Llama 3; Mistral, a list of them
    xml      <function=add><parameter=a>1</parameter></function>               Qwen3-Coder; templates without tools
    code     a fenced block, with the tool's name after the fence              templates without tools

Any text can be parsed without raising: an invalid call is reported in one line.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast, get_args

from proxima.data import ToolCall, UserError

ToolFormat = Literal["hermes", "llama", "xml", "code"]
Parameters = Mapping[str, Mapping[str, Any]]  # the schema of each tool's parameters, by the tool's name
MOST_CALLS = 32  # per message


@dataclass(frozen=True)
class ReadMessage:
    """The calls in a message, in order, and a one-line reason for each call that could not be parsed."""

    calls: tuple[ToolCall, ...] = ()
    unreadable: tuple[str, ...] = ()


def parameters_of(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schema of each tool's parameters, by the tool's name."""
    return {schema["function"]["name"]: schema["function"].get("parameters") or {} for schema in schemas}


def read_calls(text: str, tool_format: ToolFormat, tools: Parameters) -> ReadMessage:
    """Parse the tool calls in a message of the model, after its thinking. A fenced block is a call only if a tool's
    name follows the fence; its text is the tool's first argument."""
    before, thought, after = text.partition("</think>")
    text = after if thought else "" if "<think>" in text else before
    calls, unreadable = list[ToolCall](), list[str]()
    for call in READERS[tool_format](text, tools):
        if len(calls) + len(unreadable) == MOST_CALLS:
            unreadable.append(f"only {MOST_CALLS} calls of a message are read")
            break
        if isinstance(call, str):
            unreadable.append(" ".join(call.split()))
        else:
            calls.append(call)
    return ReadMessage(tuple(calls), tuple(unreadable))


def format_of(tokenizer: Any) -> ToolFormat:
    """Return the format that a tokenizer's chat template uses; `xml` if it doesn't support tools.

    Raises: UserError: it shows tools in a form that no reader here supports.
    """
    from proxima.model.template_variables import reads_tools  # environment processes must not load torch

    if not reads_tools(tokenizer):
        return "xml"
    template = tokenizer.get_chat_template(tools=[{}])
    marks = {"<function=": "xml", "<tool_call>": "hermes", "<|python_tag|>": "llama", '"parameters":': "llama"}
    marks |= {"[TOOL_CALLS]": "llama"}
    for mark, tool_format in marks.items():
        if mark in template:
            return cast(ToolFormat, tool_format)
    what = "the chat template shows tools in a form that isn't known here"
    raise UserError(what, remedy=f"set episode.tool_format to one of {', '.join(get_args(ToolFormat))}")


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
    if tool_format == "code":
        bare = f"```{call.name}\n{next(iter(arguments.values()), None)}\n```"
        read_back = read_calls(bare, "code", tools) == ReadMessage((call,))
        return bare if read_back else f"```{call.name}\n{json.dumps(arguments)}\n```"
    inside = "".join(f"<parameter={name}>{value}</parameter>\n" for name, value in arguments.items())
    return f"<function={call.name}>\n{inside}</function>"


ParsedCalls = Iterator[ToolCall | str]  # a call, or why it is invalid


def _or_why(read: Callable[[Any], ToolCall], given: Any) -> ToolCall | str:
    try:
        return read(given)
    except ValueError as error:
        return str(error)


def _hermes(text: str, tools: Parameters) -> ParsedCalls:
    start = text.find("<tool_call>")
    while start >= 0:
        at = start + len("<tool_call>")
        try:
            value, end = _json_at(text, at)
            rest = text[end : end + 200].lstrip()
            if rest and not rest.startswith("</tool_call>"):
                raise ValueError("</tool_call> does not follow the JSON of a call")
            yield _call(value)
            at = end
        except ValueError as error:
            yield str(error)
        start = text.find("<tool_call>", at)


def _llama(text: str, tools: Parameters) -> ParsedCalls:
    """Find calls only in a message that consists of nothing else: JSON within a sentence is an answer."""
    body = text.strip()
    tagged = body.startswith(("<|python_tag|>", "[TOOL_CALLS]"))
    body = body.removeprefix("<|python_tag|>").removeprefix("[TOOL_CALLS]").lstrip()
    if not tagged and not re.match(r'\[?\s*{\s*"(name|type|function|parameters|arguments)"', body):
        return
    at = 0
    while at < len(body):
        try:
            value, at = _json_at(body, at)
        except ValueError as error:
            yield str(error)
            return
        yield from (_or_why(_call, call) for call in (value if isinstance(value, list) else [value]))
        while at < len(body) and body[at] in ";, \t\r\n":
            at += 1


def _xml(text: str, tools: Parameters) -> ParsedCalls:
    yield from (_or_why(_xml_call, part) for part in text.split("<function=")[1:])


def _xml_call(part: str) -> ToolCall:
    name, bracket, body = part.partition(">")
    name = name.strip().strip("\"'")
    if not bracket or not name or not re.fullmatch(r"[^\s<>]{1,200}", name):
        raise ValueError("<function=NAME> is not complete")
    body, closed, _ = body.partition("</function>")
    arguments: dict[str, Any] = {}
    first, *parameters = body.split("<parameter=")
    for parameter in parameters:
        key, bracket, rest = parameter.partition(">")
        value, end, after = rest.partition("</parameter>")
        key = key.strip().strip("\"'")
        if not bracket or not end:
            raise ValueError(f"<parameter={key[:40]}> of {name} is not closed")
        if key in arguments:
            raise ValueError(f"the parameter {key[:40]} of {name} occurs twice")
        if after.strip():
            raise ValueError(f"there is text between the parameters of {name}")
        arguments[key] = value.removeprefix("\n").removesuffix("\n")
    if first.strip() and not parameters:
        raise ValueError(f"{name} has a text in place of <parameter=...>")
    if not closed and not parameters:
        raise ValueError(f"<function={name}> is not closed")
    return ToolCall(name=name, arguments=arguments)


FENCE = re.compile(r"^[ \t]*```[ \t]*([^\s`]*)[ \t]*$", re.MULTILINE)


def _code(text: str, tools: Parameters) -> ParsedCalls:
    opened: re.Match[str] | None = None
    for fence in FENCE.finditer(text):
        if opened is None:
            opened = fence
            continue
        if fence[1]:
            continue  # within a block, a fence with a word is part of the text
        if opened[1] in tools:
            body = text[opened.end() : fence.start()].strip("\n")
            yield _code_call(opened[1], body, tools[opened[1]])
        opened = None
    if opened is not None and opened[1] in tools:
        yield f"the block ```{opened[1][:40]} is not closed"


def _code_call(name: str, body: str, parameters: Mapping[str, Any]) -> ToolCall:
    """Read the block's text as the first argument, or as JSON of all arguments."""
    if body.lstrip().startswith("{"):
        try:
            value, end = _json_at(body, 0)
            if not body[end:].strip() and isinstance(value, dict):
                return ToolCall(name=name, arguments=value)
        except ValueError:
            pass
    first = next(iter(parameters.get("properties", {})), "")
    return ToolCall(name=name, arguments={first: body} if body.strip() else {})


READERS: dict[str, Callable[[str, Parameters], ParsedCalls]] = {
    "hermes": _hermes, "llama": _llama, "xml": _xml, "code": _code,
}  # fmt: skip


def _call(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        raise ValueError("a call must be an object with name and arguments")
    value = value["function"] if isinstance(value.get("function"), dict) else value
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a call must have a name")
    arguments: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    if isinstance(arguments, str):  # as in the OpenAI API
        arguments, _ = _json_at(arguments, 0)
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name[:60]} must be an object")
    return ToolCall(name=name.strip(), arguments=arguments)


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """Decode the JSON at a position and return it with its end; ValueError, in one line for the model, if it is invalid
    or other programs would read it differently."""
    start = len(text) - len(text[at:].lstrip()) if text[at : at + 1].isspace() else at
    if text[start : start + 1] not in ("{", "["):
        raise ValueError("a call must begin with {")
    try:
        value, end = DECODER.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("the JSON of a call has half a surrogate pair") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the JSON of a call is broken: {error.msg} at character {error.pos - start}") from None
    except RecursionError:
        raise ValueError("the JSON of a call is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the JSON of a call is broken: {str(error)[:100]}") from None
    return value, end


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key occurs twice")
    return made


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not valid JSON")


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError("a number is too large")
    return value


DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
