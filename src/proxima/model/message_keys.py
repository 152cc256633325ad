"""What a chat template writes of a message: a key that it ignores would be dropped silently.

The template itself is asked: a chat is rendered with a key and without. What must appear in the text is refused if it
does not (`require_written`): contents, thoughts, tool calls and tools. Any other key of the data is only named, once
(`unwritten_keys`). A message is judged as the newest of its chat, because templates drop earlier thoughts on purpose.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from proxima.data import FieldError, UserError
from proxima.data.flow import Message

THOUGHT = "reasoning_content"
THOUGHT_NAMES = (THOUGHT, "thinking", "reasoning")  # under which templates read it
PLAIN = frozenset({"role", "content", "images", "weight"})  # the last two are for proxima alone
REFERENCES = frozenset({"tool_call_id", "id"})  # they join results to calls, and most templates write results in order
TEXTS = frozenset({"content", THOUGHT, "tool_calls", "tools"})
Render = Callable[[Sequence[Message], Mapping[str, Any]], str]


def thought_name(tokenizer: Any) -> str:
    """The key under which the chat template reads what the assistant thought."""
    template = str(tokenizer.chat_template or "")
    return next((name for name in THOUGHT_NAMES if name in template), THOUGHT)


def require_written(messages: Sequence[Message], tokenizer: Any, arguments: Mapping[str, Any], render: Render) -> None:
    """Refuse a chat of which the template would drop a text.

    Args:
        render: renders messages with arguments of the template, complete if they end with the assistant.

    Raises:
        FieldError: names the key.
    """
    for role, key in _unwritten(messages, tokenizer, arguments, render):
        if key == "tools":
            remedy = "set task.tool_schemas=null to leave them out, or use a model whose template shows tools"
            raise FieldError("tool_schemas", key, "holds what the model's chat template does not write", remedy=remedy)
        if key in TEXTS:
            beside = " beside its tool_calls" if key == "content" else ""
            what = f"has {key}{beside} in a message of role {role!r}, which the model's chat template does not write"
            remedy = f"remove {key} from the data, or put a chat_template.jinja that reads it into the model's folder"
            raise FieldError("messages", f"{messages[-1]['content']:.60}", what, remedy=remedy)


def unwritten_keys(
    messages: Sequence[Message], tokenizer: Any, arguments: Mapping[str, Any], render: Render
) -> list[tuple[str, str]]:
    """(role, key) of each key of a message that the template does not write, other than texts and references."""
    found = _unwritten(messages, tokenizer, arguments, render)
    return [(role, key) for role, key in found if key not in TEXTS | REFERENCES]


def _unwritten(
    messages: Sequence[Message], tokenizer: Any, arguments: Mapping[str, Any], render: Render
) -> list[tuple[str, str]]:
    known, found = _known(tokenizer), list[tuple[str, str]]()
    settings = tuple(sorted((name, "" if name == "tools" else repr(value)) for name, value in arguments.items()))
    if arguments.get("tools"):
        shape: tuple[Any, ...] = ("tools", settings, messages[0]["role"])
        if shape not in known:
            without = {name: value for name, value in arguments.items() if name != "tools"}
            known[shape] = ("tools",) * (render(messages, arguments) == render(messages, without))
        found += [("", key) for key in known[shape]]
    for i, message in enumerate(messages):
        filled = frozenset(key for key, value in message.items() if value not in ("", None, [], {}))
        if filled <= PLAIN:
            continue
        shape = (message["role"], settings, filled, len(message.get("tool_calls", ())))
        if shape not in known:
            known[shape] = _ignored(messages, i, sorted(filled - PLAIN), arguments, render)
        found += [(message["role"], key) for key in known[shape]]
    return found


def _ignored(
    messages: Sequence[Message], i: int, keys: Sequence[str], arguments: Mapping[str, Any], render: Render
) -> tuple[str, ...]:
    """The keys of message i without which the template writes the same. A template that fails without one reads it."""
    before, message, after = messages[:i], messages[i], messages[i + 1 :]
    try:
        text, after = render([*before, message], arguments), ()
    except UserError:  # the template wants more messages
        text = render(messages, arguments)

    def same(without: Message) -> bool:
        try:
            return render([*before, without, *after], arguments) == text
        except UserError:
            return False

    calls = message.get("tool_calls", ())
    poorer: dict[str, list[Message]] = {key: [{k: v for k, v in message.items() if k != key}] for key in keys}
    if "tool_calls" in poorer:  # all of them, their names and their arguments
        shortened = [{**message, "tool_calls": [*calls[:n], *calls[n + 1 :]]} for n in range(len(calls))]
        poorer["tool_calls"] += shortened if len(calls) > 1 else []
        for n, call in enumerate(calls):
            for field, other in (("name", "x" + call["function"]["name"]), ("arguments", {"x": 0})):
                changed = {**call, "function": {**call["function"], field: other}}
                poorer["tool_calls"].append({**message, "tool_calls": [*calls[:n], changed, *calls[n + 1 :]]})
    if message["content"].strip():
        poorer["content"] = [{**message, "content": ""}]
    return tuple(key for key, lesser in poorer.items() if any(map(same, lesser)))


@lru_cache(maxsize=8)
def _known(tokenizer: Any) -> dict[tuple[Any, ...], tuple[str, ...]]:
    """What has been found out about a tokenizer's template, by the shape of a message: its role and its keys."""
    return {}
