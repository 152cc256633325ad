"""Converts chats in the published forms to messages of one form; no key is dropped.

A message is `{role, content}` with a text, and possibly

    reasoning_content   what the assistant thought before it wrote; in the data also `reasoning` or `thinking`
    tool_calls          a list of {type: function, id?, function: {name, arguments: an object}}
    role                system, user, assistant or tool; `developer`, OpenAI's newer name, is read as `system`
    weight              1 or 0: whether a turn of the assistant is trained (SFT); in the data also `train`, `training`
    name, tool_call_id  and any other key of the data, for the chat template

`model.chat.template_inputs` checks that the chat template writes what it is given.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from proxima.data import UserError
from proxima.data.flow import Message
from proxima.data.json_reader import load_json
from proxima.task.template import to_json_value

ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "developer": "system",
}
# ShareGPT's names of roles in its key `from`, with those that LLaMA-Factory and axolotl added
SPEAKERS = ROLES | {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
TRAINED = ("weight", "train", "training")
UNSEEN = frozenset({"audio", "audios", "image", "images", "raw", "video", "videos"})  # `raw` is proxima's own


def as_messages(value: Any, source: str, *, fills_nulls: bool = False) -> tuple[Message, ...]:
    """Read a chat: a list of messages, or the same as JSON text.

    A message is `{role, content}`, or ShareGPT's `{from, value}`. The content may be null beside tool calls or a
    thought, or a list of parts `{type: text, text}`, which are joined. `function_call` is a tool call, `arguments` may
    be JSON text, and a key with null is ignored.

    Args:
        source: where the chat was read, for the error.
        fills_nulls: the data come from a table whose objects all have the same keys, so a null among the arguments of a
            call means that the argument is absent. Messages that all have the same keys, some with null, are read so
            in any case: a JSON file that a table was written to has them.

    Raises:
        UserError: the value is anything else or empty, a role is unknown, or the model would not see a part or key.
    """
    if isinstance(value, str):
        try:
            value = load_json(value)
        except ValueError:
            raise UserError(f"{source} holds text, expected a list of {{role, content}}; map it as question") from None
    if not isinstance(value, (list, tuple)) or not value:
        raise UserError(f"{source} holds {value!r:.60}, expected a list of {{role, content}}")
    fills_nulls = fills_nulls or _of_a_table(value)
    return tuple(_message(given, source, fills_nulls) for given in value)


def _of_a_table(messages: Sequence[Any]) -> bool:
    """True if the messages were written from a table, in which all objects have the same keys: each message has all
    keys of the others, and some of them are null."""
    objects = [message for message in messages if isinstance(message, Mapping)]
    if len(objects) < 2 or len({frozenset(message) for message in objects}) > 1:
        return False
    return any(_has_null(message) for message in objects)


def _has_null(message: Mapping[str, Any]) -> bool:
    return any(item is None for key, item in message.items() if key != "content")


def _message(given: Any, source: str, fills_nulls: bool) -> Message:
    left: dict[str, Any] = {}
    if isinstance(given, Mapping):
        left = {key: item for key, item in given.items() if item is not None}
    shared = "from" in left and "role" not in left  # ShareGPT's form
    if shared:
        roles = SPEAKERS
        speaker = left.pop("from")
        content = left.pop("value", None)
    else:
        roles = ROLES
        speaker = left.pop("role", None)
        content = left.pop("content", None)
    role = roles.get(speaker) if isinstance(speaker, str) else None
    seen = sorted(UNSEEN & {key for key, item in left.items() if item})
    if seen:
        what = f"{source} holds a message with the key {seen[0]!r}, which the model would not see"
        raise UserError(what, remedy="remove these rows, or the key")
    if shared and speaker == "function_call":
        left["tool_calls"] = [content] if isinstance(content, str) else content
        content = None
    calls = _calls(left, source, fills_nulls)
    thoughts = [left.pop(key) for key in THOUGHTS if key in left]
    if content is None and (calls or any(thoughts)):
        content = ""
    if isinstance(content, list | tuple):
        content = _text_of(content, source)
    if role is None or not isinstance(content, str):
        expected = f"expected a role among {', '.join(dict.fromkeys(ROLES.values()))} and a text content"
        raise UserError(f"{source} holds the message {given!r:.80}, {expected}")
    message: Message = {"role": role, "content": content}
    thought = _thought(thoughts, source)
    if thought and thought.strip():
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    weight = _weight(left, role, source)
    if weight is not None:
        message["weight"] = weight
    return message | {str(key): to_json_value(item) for key, item in left.items()}


def _text_of(parts: Sequence[Any], source: str) -> str:
    """Join the texts of a content in parts."""
    for part in parts:
        if isinstance(part, Mapping):
            kind = str(part.get("type"))
        else:
            kind = type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            column = source.rpartition("column ")[2].strip("'")
            remedy = "remove these rows, or give the text as the message's content"
            if kind == "image":
                remedy = f"images={column} shows it; else {remedy}"
            what = f"{source} holds a message with a part of type {kind!r}, which the model would not see"
            raise UserError(what, remedy=remedy)
    return "".join(part["text"] for part in parts)


def _thought(thoughts: Sequence[Any], source: str) -> str | None:
    """The thought of a message, under any of its names; UserError for two that differ."""
    different = list(dict.fromkeys(map(str, filter(None, thoughts))))
    if len(different) > 1 or not all(isinstance(thought, str) for thought in filter(None, thoughts)):
        what = f"{source} holds a message whose {', '.join(THOUGHTS)} are not one text"
        raise UserError(what, remedy="keep one of these keys")
    return different[0] if different else None


def _weight(left: dict[str, Any], role: str, source: str) -> int | None:
    """1 or 0 if a message says whether it is trained; otherwise None."""
    weights = {key: left.pop(key) for key in TRAINED if key in left}
    for key, weight in weights.items():
        if weight not in (0, 1):
            raise UserError(f"{source} holds a message with {key}={weight!r:.40}", remedy="it must be 0 or 1")
        if weight and role != "assistant":
            what = f"{source} holds a message of role {role!r} with {key}={weight!r}"
            raise UserError(what, remedy="only turns of the assistant are trained: remove the key, or set it to 0")
    if len(set(map(bool, weights.values()))) > 1:
        raise UserError(f"{source} holds a message whose {', '.join(weights)} differ", remedy="keep one of these keys")
    if weights and role == "assistant":
        return int(next(iter(weights.values())))
    return None


def _calls(left: dict[str, Any], source: str, fills_nulls: bool) -> list[dict[str, Any]]:
    """The tool calls of a message, in the form that chat templates read: arguments are an object."""
    value = left.pop("tool_calls", None) or []
    older = left.pop("function_call", None)
    if isinstance(value, str):
        value = json_value(value, f"{source}: tool_calls")
    given = list(value) if isinstance(value, list | tuple) else [value]
    if older:
        given.append(older)
    calls: list[Any] = []
    for call in given:
        calls += _several(call, source)
    return [_call(call, source, fills_nulls) for call in calls]


def _several(call: Any, source: str) -> list[Any]:
    """A call, or the calls in a JSON text."""
    if isinstance(call, str):
        call = json_value(call, f"{source}: a tool call")
    return list(call) if isinstance(call, list) else [call]


def _call(call: Any, source: str, fills_nulls: bool) -> dict[str, Any]:
    function = None
    if isinstance(call, Mapping):
        function = call.get("function", call)
    name = None
    if isinstance(function, Mapping):
        name = function.get("name")
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        what = f"{source} holds the tool call {call!r:.80}"
        raise UserError(what, remedy="write it as {type: function, function: {name, arguments}}")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        fills_nulls = False  # whoever wrote the text wrote its nulls
        arguments = json_value(arguments or "{}", f"{source}: the arguments of a call of {name!r}")
    if not isinstance(arguments, Mapping | None):
        what = f"{source} holds a call of {name!r} with the arguments {arguments!r:.60}"
        raise UserError(what, remedy="give them as an object, or as its JSON text")
    arguments = arguments or {}
    if fills_nulls:
        arguments = without_nulls(arguments)
    written: dict[str, Any] = {"type": "function"}
    if call.get("id") is not None:
        written["id"] = str(call["id"])
    written["function"] = {"name": name, "arguments": to_json_value(arguments)}
    return written


def as_tools(value: Any, source: str, *, fills_nulls: bool = False) -> list[dict[str, Any]]:
    """Read the tools of a row, which the chat template shows: a list of JSON schemas, each `{type: function, function:
    {name, description, parameters}}` or the function alone, or the same as JSON text; empty for null.

    Raises:
        UserError: the value is anything else.
    """
    if isinstance(value, str) and value.strip():
        value = json_value(value, f"{source}: tools")
    tools = []
    for entry in _listed(value, source):
        tool = entry
        if isinstance(entry, str) and entry.lstrip().startswith("{"):
            tool = json_value(entry, f"{source}: a tool")
        function = None
        if isinstance(tool, Mapping):
            function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            what = f"{source} holds {tool!r:.60} as a tool, expected {{type: function, function: {{name, parameters}}}}"
            raise UserError(what, remedy="map another column with task.tool_schemas, or set it to null for no tools")
        if function is tool:  # the function alone
            tool = {"type": "function", "function": tool}
        if fills_nulls or _has_null_properties(tool):
            tool = without_nulls(tool)
        tools.append(to_json_value(tool))
    return tools


def _has_null_properties(tool: Mapping[str, Any]) -> bool:
    """True for a schema that was written from a table: its properties are those of all tools, and null is no schema."""
    parameters = tool["function"].get("parameters")
    properties = None
    if isinstance(parameters, Mapping):
        properties = parameters.get("properties")
    return isinstance(properties, Mapping) and any(schema is None for schema in properties.values())


def _listed(value: Any, source: str) -> Sequence[Any]:
    if value is None or (isinstance(value, str) and not value.strip()):
        return ()
    if not isinstance(value, list | tuple):
        what = f"{source} holds {value!r:.60} as tools, expected a list of JSON schemas"
        raise UserError(what, remedy="map another column with task.tool_schemas, or set it to null for no tools")
    return value


def without_nulls(value: Any) -> Any:
    """The value without keys of null in its objects."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def json_value(text: str, what: str) -> Any:
    """Parse a JSON text; UserError, which begins with `what`, if it is not JSON."""
    try:
        return load_json(text)
    except ValueError as error:
        raise UserError(f"{what} should be JSON: {text!r:.60}: {error}", remedy="repair or remove the row") from None
