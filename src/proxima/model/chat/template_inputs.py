"""What a chat template reads: keys of messages, variables, and the clock.

**Keys.** A key that the template ignores would be dropped silently. The template itself is asked: a chat is rendered
with a key and without. What must appear in the text is refused if it does not (`require_written`): contents, thoughts,
tool calls and tools. Any other key of the data is only named, once (`unwritten_keys`). A message is judged as the
newest of its chat, because templates drop earlier thoughts on purpose.

**Clock.** transformers gives templates the clock of the machine, `strftime_now`, so that the prompts of a run would
change at midnight, and those of a resume on another day would not be those of the run. Within `fixed_clock` it stands
still for the whole process.
"""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from proxima.data import FieldError, UserError
from proxima.data.flow import Message
from proxima.model.chat.template_budget import bounded_environment

THOUGHT = "reasoning_content"
THOUGHT_NAMES = (THOUGHT, "thinking", "reasoning")  # under which templates read it
PLAIN = frozenset({"role", "content", "images", "weight"})  # the last two are for proxima alone
REFERENCES = frozenset({"tool_call_id", "id"})  # they join results to calls, and most templates write results in order
TEXTS = frozenset({"content", THOUGHT, "tool_calls", "tools"})
Render = Callable[[Sequence[Message], Mapping[str, Any]], str]
SET_HERE = frozenset({"messages", "add_generation_prompt", "continue_final_message"})
NOT_ARGUMENTS = frozenset({"namespace", "raise_exception", "range", "dict", "strftime_now", "cycler", "joiner"})
NAME = "strftime_now"  # of the function in a template
_clocks: list["TemplateClock"] = []  # entered and not yet left, the innermost last


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
            raise FieldError("tool_schemas", key, "has fields that the model's chat template ignores", remedy=remedy)
        if key in TEXTS:
            beside = " beside its tool_calls" if key == "content" else ""
            what = f"has {key}{beside} in a message of role {role!r}, which the model's chat template ignores"
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
    known = _known(tokenizer, str(tokenizer.chat_template))
    found = list[tuple[str, str]]()
    without = {name: value for name, value in arguments.items() if name != "tools"}
    settings = (*sorted((name, repr(value)) for name, value in without.items()), "tools" in arguments)
    if arguments.get("tools"):
        shape: tuple[Any, ...] = ("tools", settings, messages[0]["role"])
        if shape not in known:
            ignored = render(messages, arguments) == render(messages, without)
            known[shape] = ("tools",) if ignored else ()
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
    before = messages[:i]
    message = messages[i]
    after = messages[i + 1 :]
    try:
        text = render([*before, message], arguments)
        after = ()
    except UserError:  # the template wants more messages
        text = render(messages, arguments)

    def same(without: Message) -> bool:
        try:
            return render([*before, without, *after], arguments) == text
        except UserError:
            return False

    calls = message.get("tool_calls", ())
    poorer = dict[str, list[Message]]()
    for key in keys:
        poorer[key] = [{name: value for name, value in message.items() if name != key}]
    if "tool_calls" in poorer:
        poorer["tool_calls"] += [{**message, "tool_calls": changed} for changed in _other_calls(calls)]
    if message["content"].strip():
        poorer["content"] = [{**message, "content": ""}]
    return tuple(key for key, lesser in poorer.items() if any(map(same, lesser)))


def _other_calls(calls: Sequence[Any]) -> Iterator[list[Any]]:
    """The calls of a message without each of several, and with another name and other arguments for each."""
    if len(calls) > 1:
        for n in range(len(calls)):
            yield [*calls[:n], *calls[n + 1 :]]
    for n, call in enumerate(calls):
        function = call["function"]
        for other in ({"name": "x" + function["name"]}, {"arguments": {"x": 0}}):
            changed = {**call, "function": {**function, **other}}
            yield [*calls[:n], changed, *calls[n + 1 :]]


@lru_cache(maxsize=8)
def _known(tokenizer: Any, template: str) -> dict[tuple[Any, ...], tuple[str, ...]]:
    """What has been found out about a tokenizer's template, by the shape of a message: its role and its keys. The
    template may be replaced."""
    return {}


def takes_text_arguments(tokenizer: Any) -> bool:
    """True if the template writes the arguments of a tool call as they are, so that they have to be a JSON text: it
    fails for an object, or writes Python's spelling of it. Those of DeepSeek V3 and R1 do."""
    return _takes_text_arguments(tokenizer, str(tokenizer.chat_template or ""))


@lru_cache(maxsize=8)
def _takes_text_arguments(tokenizer: Any, template: str) -> bool:
    given = {"x": 1}
    function = {"name": "f", "arguments": given}
    answer: Message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    chat: list[Message] = [{"role": "user", "content": "?"}, answer]

    def written(message: Message) -> str:
        try:
            return str(tokenizer.apply_chat_template([*chat[:-1], message], chat_template=template, tokenize=False))
        except Exception:  # of any kind: the template is a program
            return ""

    of_object = written(answer)
    if of_object and str(given) not in of_object:
        return False
    return json.dumps(given) in written(with_text_arguments(answer))


def with_text_arguments(message: Message) -> Message:
    """The message with the arguments of its tool calls as JSON texts."""
    calls = []
    for call in message.get("tool_calls", ()):
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    if calls:
        return {**message, "tool_calls": calls}
    return message


def reads_tools(tokenizer: Any) -> bool:
    """True if the chat template shows tools to the model."""
    if tokenizer.chat_template is None:
        return False
    read = _variables(tokenizer.get_chat_template(tools=[{}]))  # a dummy tool: some have a separate template for tools
    return read is not None and "tools" in read


def unread(tokenizer: Any, arguments: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that the chat template does not read, or that proxima sets."""
    if tokenizer.chat_template is None:
        return list(arguments)
    read = _variables(tokenizer.get_chat_template(tools=arguments.get("tools")))
    return [name for name in arguments if name in SET_HERE or (read is not None and name not in read)]


def require_read(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the chat template does not read: a mistyped one would change nothing."""
    read = _variables(tokenizer.get_chat_template(tools=arguments.get("tools")))
    for name in unread(tokenizer, arguments):
        theirs = sorted((read or set()) - SET_HERE - NOT_ARGUMENTS - set(tokenizer.special_tokens_map))
        near = difflib.get_close_matches(name, theirs, 1)
        remedy = f"did you mean {near[0]!r}?" if near else f"it reads {', '.join(theirs) or 'none'}"
        reason = "is set by proxima" if name in SET_HERE else "is not read by the model's chat template"
        raise FieldError(f"data.template_arguments.{name}", arguments[name], reason, remedy=remedy)


@lru_cache(maxsize=8)
def _variables(template: str) -> set[str] | None:
    """The names that a template expects from its caller; None if it can't be parsed: rendering then says why."""
    from jinja2 import meta

    try:
        return meta.find_undeclared_variables(bounded_environment().parse(template))
    except Exception:  # of a parser that recurses, too
        return None


@dataclass(eq=False)
class TemplateClock:
    """A clock that stands still.

    Args:
        date: its moment: a date, or date and time, as in ISO 8601.
        named: a template that names the clock has been rendered.
        read: a template has read it.
    """

    date: str
    named: bool = False
    read: bool = False

    def now(self) -> datetime:
        """The moment of the clock, in the place of `datetime.now`."""
        self.read = True
        return datetime.fromisoformat(self.date)


def current_clock() -> TemplateClock | None:
    """The clock of the innermost `fixed_clock`; None outside."""
    return _clocks[-1] if _clocks else None


@contextmanager
def fixed_clock(moment: str | None) -> Iterator[TemplateClock]:
    """Let templates read this moment (see `TemplateClock`) until the end of the block; None: the beginning of today."""
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    clock = TemplateClock(moment or date.today().isoformat())
    machine = module.datetime
    module.datetime = SimpleNamespace(now=clock.now)
    _clocks.append(clock)
    try:
        yield clock
    finally:
        _clocks.remove(clock)
        module.datetime = machine


def require_moment(moment: str | None) -> None:
    """Raise FieldError unless the text is a date, or date and time."""
    try:
        datetime.fromisoformat(moment or "2000-01-01")
    except ValueError:
        reason = "must be a date, or date and time, of ISO 8601"
        raise FieldError("template_date", moment, reason, remedy="write 2024-07-26, or 2024-07-26T18:30") from None


def clock_notes(clock: TemplateClock | None, given: str | None) -> list[str]:
    """A warning if templates read the clock and no date was given, or if one was given in vain."""
    if clock is None:
        return []
    if clock.read and given is None:
        what = f"the chat template reads the clock and writes the date into prompts, here {clock.date}"
        return [f"{what}; data.template_date sets it, and a run keeps that of its start, also when it is resumed"]
    if given is not None and not clock.named:
        return [f"data.template_date={given} has no effect: the chat template reads no clock"]
    return []
