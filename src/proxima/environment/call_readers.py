"""Readers of tool calls, one for each format: text → calls, and a reason for each call that is invalid. The formats
are listed in `tool_calls`."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NoReturn

from proxima.data.episode import ToolCall
from proxima.data.json_reader import MAX_DEPTH_RECEIVED, TooDeepError, bounded_int, check_depth, load_json

ToolFormat = Literal["hermes", "llama", "glm", "mistral", "deepseek", "kimi", "minimax", "xml", "code"]
Parameters = Mapping[str, Mapping[str, Any]]  # the schema of each tool's parameters, by the tool's name
MOST_CALLS = 32  # per message


@dataclass(frozen=True)
class ReadMessage:
    """The calls in a message, in order, and a one-line reason for each call that could not be parsed. `written_as`: it
    has calls in this other format alone; empty: it has none, or some that could be parsed."""

    calls: tuple[ToolCall, ...] = ()
    unreadable: tuple[str, ...] = ()
    written_as: str = ""


ParsedCalls = Iterator[ToolCall | str]  # a call, or why it is invalid


def _or_why(read: Callable[[Any], ToolCall], given: Any) -> ToolCall | str:
    try:
        return read(given)
    except ValueError as error:
        return str(error)


def _each(value: Any) -> ParsedCalls:
    """Read a call, or each of a list."""
    calls = value if isinstance(value, list) else [value]
    for call in calls:
        yield _or_why(_call, call)


def _hermes(text: str, tools: Parameters) -> ParsedCalls:
    start = text.find("<tool_call>")
    while start >= 0:
        at = start + len("<tool_call>")
        try:
            value, end = _json_at(text, at)
            rest = text[end : end + 200].lstrip()
            if rest and not rest.startswith("</tool_call>"):
                raise ValueError("</tool_call> does not follow the JSON of a call")
            yield from _each(value)
            at = end
        except ValueError as error:
            yield str(error)
        start = text.find("<tool_call>", at)


# of Llama 3, Mistral before v11, Phi-4-mini and Granite 3, Nemotron; the closing tag is often missing
JSON_TAGS = {
    "<|python_tag|>": "", "[TOOL_CALLS]": "", "<|tool_call|>": "<|/tool_call|>", "<TOOLCALL>": "</TOOLCALL>",
}  # fmt: skip


def _llama(text: str, tools: Parameters) -> ParsedCalls:
    """Find calls only in a message that consists of nothing else: JSON within a sentence is an answer."""
    body = text.strip()
    tag = next((tag for tag in JSON_TAGS if body.startswith(tag)), "")
    body = body.removeprefix(tag).removesuffix(JSON_TAGS.get(tag, "")).strip()
    if not tag and not re.match(r'\[?\s*{\s*"(name|type|function|parameters|arguments)"', body):
        return
    at = 0
    while at < len(body):
        try:
            value, at = _json_at(body, at)
        except ValueError as error:
            yield str(error)
            return
        yield from _each(value)
        while at < len(body) and body[at] in ";, \t\r\n":
            at += 1


XML_PARAMETER = re.compile(r"<parameter=[^<>]*>(?:(?!<parameter=).)*?</parameter>", re.DOTALL)


def _xml(text: str, tools: Parameters) -> ParsedCalls:
    """Find `<function=NAME>…</function>`; inside a parameter both tags are text, such as the code that it holds."""
    outside = XML_PARAMETER.sub(lambda match: " " * len(match[0]), text)
    starts = [match.start() for match in re.finditer("<function=", outside)]  # possibly none
    for start, end in zip(starts, [*starts[1:], len(text)], strict=False):
        close = outside.find("</function>", start, end)
        closed = close >= 0
        if closed:
            end = close
        yield _or_why(_xml_call, (text[start + len("<function=") : end], closed))


def _xml_call(part: tuple[str, bool]) -> ToolCall:
    """Read what follows `<function=`, up to the closing tag if there is one."""
    written, closed = part
    name, bracket, body = written.partition(">")
    name = name.strip().strip("\"'")
    if not bracket or not name or not re.fullmatch(r"[^\s<>]{1,200}", name):
        raise ValueError("<function=NAME> is not complete")
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


GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _glm(text: str, tools: Parameters) -> ParsedCalls:
    start = text.find("<tool_call>")
    while start >= 0:
        at = start + len("<tool_call>")
        try:
            call, at = _glm_call(text, at, tools)
            yield call
        except ValueError as error:
            yield str(error)
        start = text.find("<tool_call>", at)


def _glm_call(text: str, at: int, tools: Parameters) -> tuple[ToolCall, int]:
    """Read a call that begins at a position, and return it with its end; the closing tag may be missing at the end of
    the text."""
    opening = re.compile(r"\s*([^\s<>{}\[\]()]{1,200})\s*(?=<|$)").match(text, at)
    if opening is None:
        raise ValueError("a call must begin with its name, followed by <arg_key>")
    name = opening[1]
    at = opening.end()
    arguments: dict[str, Any] = {}
    while (argument := GLM_ARGUMENT.match(text, at)) is not None:
        key = argument[1].strip()
        at = argument.end()
        if key in arguments:
            raise ValueError(f"the argument {key[:40]} of {name[:60]} occurs twice")
        arguments[key] = _plain_or_json(argument[2], name, key, tools)
    rest = text[at:].lstrip()
    if rest and not rest.startswith("</tool_call>"):
        raise ValueError(f"{name[:60]} has an argument that is not <arg_key>…</arg_key><arg_value>…</arg_value>")
    return ToolCall(name=name, arguments=arguments), at


def _plain_or_json(text: str, name: str, key: str, tools: Parameters) -> Any:
    """The value of an argument of a tool: a text where the schema says so, or where it is no JSON of another type."""
    schema = (tools.get(name, {}).get("properties") or {}).get(key)
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        value = load_json(text.strip(), depth=MAX_DEPTH_RECEIVED, **HOOKS)
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError:
        return text
    return text if isinstance(value, str) else value


MISTRAL_NAME = r"[^\s\[\]{}]{1,200}(?:\[CALL_ID\]\s*\w*)?$"
MISTRAL_CALL = re.compile(
    r"\s*(?:\[TOOL_CALLS\])?\s*([^\s\[\]{}]{1,200})\s*(?:\[CALL_ID\]\s*\w*)?\s*(?:\[ARGS\])?\s*(?=\{)"
)


def _mistral(text: str, tools: Parameters) -> ParsedCalls:
    """Find `[TOOL_CALLS]name[ARGS]{…}`. The tags are control tokens, which a decoded text may lack: without them, calls
    are one after the other up to the end of the message."""
    at = mistral_start(text, tools)
    if at < 0:
        return
    tagged = "[TOOL_CALLS]" in text or "[ARGS]" in text
    calls = list[ToolCall]()
    end = len(text.rstrip(" \t\r\n;,"))
    while at < end:
        call = MISTRAL_CALL.match(text, at)
        if call is None:
            if tagged:
                yield from calls
                yield "[TOOL_CALLS] is not followed by a name, [ARGS] and {"
            return  # JSON within a sentence is an answer
        try:
            value, at = _json_at(text, call.end())
        except ValueError as error:
            yield from calls
            yield str(error)
            return
        calls.append(ToolCall(name=call[1], arguments=value))
        while at < end and text[at] in ";, \t\r\n":
            at += 1
    yield from calls


def mistral_start(text: str, tools: Parameters) -> int:
    """The position of the first call of a message in Mistral's format; -1: there is none."""
    at = text.find("[TOOL_CALLS]")
    if at >= 0:
        return at
    at = text.find("[ARGS]")
    if at >= 0:
        before = max(0, at - 300)
        name = re.search(MISTRAL_NAME, text[before:at])
        if name is not None:
            return before + name.start()
    first = re.match(r"\s*[A-Za-z_][\w.-]{0,200}\{\"", text)
    if first is None and tools:
        names = "|".join(map(re.escape, sorted(tools, key=len, reverse=True)))
        first = re.search(rf"(?<!\S)(?:{names})(?:\{{|\s+\{{\s*[\"}}])", text)
    return -1 if first is None else first.start()


# The texts with which a call begins, of every format: what precedes the first one is no call. The tags of JSON_TAGS
# come before a call of `llama`, which otherwise is a message of JSON alone.
OPENINGS: dict[str, str] = {
    "deepseek": r"<[｜|]tool▁calls?▁begin[｜|]>",
    "glm": r"<tool_call>",
    "hermes": r"<tool_call>",
    "kimi": r"<\|tool_call(s_section)?_begin\|>|(?<![\w.])functions\.[\w.-]{1,200}:\d{1,9}\s{0,99}\{",
    "llama": r"<\|python_tag\|>|<\|tool_call\|>|<TOOLCALL>|\[TOOL_CALLS\]|\[\s{0,99}\{|\{",
    "minimax": r"<minimax:tool_call>|<invoke name=",
    "xml": r"<function=",
    "code": r"```",
}
DEEPSEEK_BARE = r"(?<![\w.])function(?:{names})\s{0,99}```"  # where tags are control tokens, a text may lack them


def call_start(text: str, tool_format: str, tools: Parameters) -> int:
    """The position of the first call of a message in a format; -1: there is none."""
    if tool_format == "mistral":
        return mistral_start(text, tools)

    pattern = OPENINGS[tool_format]
    if tool_format == "deepseek" and tools:
        pattern += "|" + DEEPSEEK_BARE.replace("{names}", "|".join(map(re.escape, tools)))
    first = re.search(pattern, text)
    return -1 if first is None else first.start()


# of V3 and R1 `function<sep>NAME` and a fenced block, from V3.1 on `NAME<sep>` and JSON
DEEPSEEK_TAG = re.compile(r"<[｜|]tool▁call▁begin[｜|]>")
DEEPSEEK_CALL = re.compile(
    r"<[｜|]tool▁call▁begin[｜|]>\s{0,99}([^\s<>{}`]{1,200})\s{0,99}<[｜|]tool▁sep[｜|]>"
    r"\s{0,99}(?:([^\s<>{}`]{1,200})\s{0,99}```(?:json)?)?\s{0,99}(?=\{)"
)


def _deepseek(text: str, tools: Parameters) -> ParsedCalls:
    if DEEPSEEK_TAG.search(text):
        yield from _tagged(text, DEEPSEEK_TAG, DEEPSEEK_CALL, "<｜tool▁sep｜> and { do not follow")
        return
    at = call_start(text, "deepseek", tools)
    if at >= 0:
        names = "|".join(map(re.escape, tools))
        bare = re.compile(rf"function({names})\s{{0,99}}```(?:json)?\s{{0,99}}(?=\{{)")
        yield from _tagged(text[at:], bare, bare, "")


KIMI_TAG = re.compile(r"<\|tool_call_begin\|>|(?<![\w.])(?=functions\.[\w.-]{1,200}:\d{1,9}\s{0,99}\{)")
KIMI_CALL = re.compile(
    r"(?:<\|tool_call_begin\|>)?\s{0,99}(?:functions\.)?([\w.-]{1,200})(?::\d{1,9})?\s{0,99}"
    r"(?:<\|tool_call_argument_begin\|>)?\s{0,99}(?=\{)"
)


def _kimi(text: str, tools: Parameters) -> ParsedCalls:
    return _tagged(text, KIMI_TAG, KIMI_CALL, "functions.NAME:0, <|tool_call_argument_begin|> and { do not follow")


def _tagged(text: str, tag: re.Pattern[str], opening: re.Pattern[str], why: str) -> ParsedCalls:
    """Find calls of a name and its arguments as JSON, each after a tag; the name is the last group of `opening`."""
    mark = tag.search(text)
    while mark is not None:
        call = opening.match(text, mark.start())
        at = mark.end()
        try:
            if call is None:
                raise ValueError(f"{why} {mark[0]}")
            value, at = _json_at(text, call.end())
            yield _call({"name": call[call.lastindex or 0], "arguments": value})
        except ValueError as error:
            yield str(error)
        mark = tag.search(text, max(at, mark.end() + (mark.end() == mark.start())))


MINIMAX_NAME = re.compile(r"<invoke name=[\"']?([^\s\"'<>]{1,200})[\"']?>")
MINIMAX_PARAMETER = re.compile(r"\s*<parameter name=[\"']?([^\"'<>]{1,200})[\"']?>(.*?)</parameter>", re.DOTALL)


def _minimax(text: str, tools: Parameters) -> ParsedCalls:
    last = text.rfind("</parameter>")  # behind it every parameter is incomplete: its end is not searched again
    start = text.find("<invoke name=")
    while start >= 0:
        at = start + len("<invoke name=")
        try:
            call, at = _minimax_call(text, start, last, tools)
            yield call
        except ValueError as error:
            yield str(error)
        start = text.find("<invoke name=", at)


def _minimax_call(text: str, at: int, last: int, tools: Parameters) -> tuple[ToolCall, int]:
    """Read a call that begins at a position, and return it with its end; `last` is where the last parameter ends."""
    opening = MINIMAX_NAME.match(text, at)
    if opening is None:
        raise ValueError('<invoke name="NAME"> is not complete')
    name = opening[1]
    at = opening.end()
    arguments: dict[str, Any] = {}
    while at < last and (parameter := MINIMAX_PARAMETER.match(text, at)) is not None:
        key = parameter[1].strip()
        at = parameter.end()
        if key in arguments:
            raise ValueError(f"the parameter {key[:40]} of {name[:60]} occurs twice")
        arguments[key] = _plain_or_json(parameter[2], name, key, tools)
    if not text[at : at + 200].lstrip().startswith("</invoke>"):
        raise ValueError(f'{name[:60]} has something else than <parameter name="…">…</parameter> before </invoke>')
    return ToolCall(name=name, arguments=arguments), at


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
    if not body.strip():
        return ToolCall(name=name, arguments={})
    first = next(iter(parameters.get("properties", {})), "")
    return ToolCall(name=name, arguments={first: body})


READERS: dict[str, Callable[[str, Parameters], ParsedCalls]] = {
    "hermes": _hermes, "llama": _llama, "glm": _glm, "mistral": _mistral, "deepseek": _deepseek, "kimi": _kimi,
    "minimax": _minimax, "xml": _xml, "code": _code,
}  # fmt: skip


def _call(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        raise ValueError("a call must be an object with name and arguments")
    if isinstance(value.get("function"), dict):
        value = value["function"]
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
    start = at
    if text[at : at + 1].isspace():
        start = len(text) - len(text[at:].lstrip())
    if text[start : start + 1] not in ("{", "["):
        raise ValueError("a call must begin with {")
    try:
        value, end = DECODER.raw_decode(text, start)
        check_depth(json.dumps(value, ensure_ascii=False).encode(), MAX_DEPTH_RECEIVED)
    except UnicodeEncodeError:
        raise ValueError("the JSON of a call has half a surrogate pair") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the JSON of a call is broken: {error.msg} at character {error.pos - start}") from None
    except (RecursionError, TooDeepError):
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
    value = float(number)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


HOOKS: dict[str, Any] = {"object_pairs_hook": _unique, "parse_constant": _refuse, "parse_float": _finite}
DECODER = json.JSONDecoder(parse_int=bounded_int, **HOOKS)


# Texts that nothing but a call in the format has. In what is left, JSON and fenced blocks also answer questions.
UNMISTAKABLE: dict[ToolFormat, str] = {
    "xml": r"<function=[^\s<>]",
    "minimax": OPENINGS["minimax"],
    "deepseek": OPENINGS["deepseek"],
    "kimi": r"<\|tool_call(s_section)?_begin\|>",
    "mistral": r"\[TOOL_CALLS\][^\s\[{]",
    "glm": r"<tool_call>[^<{]{0,200}<arg_key>",
    "hermes": r"<tool_call>",
    "llama": r"<\|python_tag\|>|<\|tool_call\|>|<TOOLCALL>|\[TOOL_CALLS\]",
}


def other_format(text: str, tool_format: ToolFormat, tools: Parameters, *, broken: bool) -> ToolFormat | None:
    """The format of the calls in a message that is to have them in `tool_format`; None: it has none in another.

    Their reader finds a call of a known tool, or they begin as only a call does. Fenced blocks are never taken for
    calls: they may be the answer.

    Args:
        broken: the message has a call of its own format that can't be parsed, so that a beginning alone says nothing.
    """
    others: list[ToolFormat] = [other for other in UNMISTAKABLE if other != tool_format]
    for other in others:
        read = list(islice(READERS[other](text, tools), MOST_CALLS))
        calls = [call for call in read if isinstance(call, ToolCall) and call.name in tools]
        in_a_sentence = other == "llama" and len(calls) < len(read)
        if calls and not in_a_sentence:
            return other
    if broken:
        return None
    same = OPENINGS.get(tool_format, "")  # <tool_call> also begins a broken call of the format that is read
    for other in others:
        if UNMISTAKABLE[other] != same and re.search(UNMISTAKABLE[other], text):
            return other
    return None


def read_calls(text: str, tool_format: ToolFormat, tools: Parameters) -> ReadMessage:
    """Parse the tool calls in a message of the model, after its thinking. A fenced block is a call only if a tool's
    name follows the fence; its text is the tool's first argument. A message that has calls in another format alone is
    unreadable."""
    _, thought, after = text.partition("</think>")
    if thought:
        text = after
    elif "<think>" in text:  # which has no end
        text = ""
    calls: list[ToolCall] = []
    unreadable: list[str] = []
    for call in READERS[tool_format](text, tools):
        if len(calls) + len(unreadable) == MOST_CALLS:
            unreadable.append(f"only {MOST_CALLS} calls of a message are read")
            break
        if isinstance(call, str):
            unreadable.append(" ".join(call.split()))
        else:
            calls.append(call)
    if not calls:
        other = other_format(text, tool_format, tools, broken=bool(unreadable))
        if other is not None:
            why = f"a call is written as {other}, and read as {tool_format}"
            return ReadMessage(unreadable=(why,), written_as=other)
    return ReadMessage(tuple(calls), tuple(unreadable))
