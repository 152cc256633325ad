"""Warnings about chat templates that silently change the rows of a run; a run prints each once, at its start."""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from proxima.data import UserError
from proxima.data.flow import Message
from proxima.model.chat.answer import ANSWER, ASKED, turn_end
from proxima.model.chat.encode import SafeMessage, Tokenizer, control_texts, encode_part, render_chat, with_stand_ins
from proxima.task.protocol import Rows

READ = 100  # rows, evenly spaced
TAG = re.compile(r"</?[A-Za-z][\w:.-]*>|\[/?[A-Z_]+\]")
SYSTEM: Message = {"role": "system", "content": "Be brief!"}
# Where a turn begins in the templates of well-known families: a row that holds one was rendered before.
TURNS = (
    "<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|turn>", "[INST]", "<|user|>", "<|assistant|>",
    "<|system|>", "<｜User｜>", "<｜Assistant｜>", "<|start|>user", "<|start|>assistant", "<|START_OF_TURN_TOKEN|>",
    "<|start_of_role|>",
)  # fmt: skip


def template_note(tokenizer: Tokenizer, model: str) -> list[str]:
    """Return a warning if the tokenizer has no chat template, else an empty list."""
    if tokenizer.chat_template is not None:
        return []
    what = f"{model} has no chat template: a prompt is the contents of its messages, one a line, without roles"
    return [f"{what}; if the model was trained on a template, put its chat_template.jinja into the model's folder"]


def template_notes(
    tokenizer: Any,
    model: str,
    rows: Rows,
    *,
    system: str | None,
    arguments: Mapping[str, Any],
    stops: Sequence[int],
    stop_texts: Sequence[str] = (),
) -> list[str]:
    """Return a warning for each trap.

    Args:
        rows: those of the task; a few of them are read.
        system, arguments: the system prompt of rows without one, and the arguments of the template.
        stops: the token ids that end an answer by the model's own files.
        stop_texts: the texts that end an answer.
    """
    read = _some_chats(rows)
    chats = [chat for chat in read if not any(message.get("raw") for message in chat)]
    turns = _turn_marks(tokenizer)
    notes = _rendered_rows(chats, turns) + _spelt_tokens(tokenizer, chats, turns)
    if tokenizer.chat_template is None:
        if chats or not read:
            return [*template_note(tokenizer, model), *notes]
        return notes
    notes += stop_note(tokenizer, stops, stop_texts)
    messages = chain.from_iterable(chats)
    if system is not None or any(message["role"] == "system" for message in messages):
        notes += system_note(tokenizer, arguments)
    return notes


def _some_chats(rows: Rows) -> list[tuple[Message, ...]]:
    if not len(rows):
        return []
    chats = []
    for number in sorted({i * len(rows) // READ for i in range(READ)}):
        with suppress(UserError):  # said where the row is used
            chats.append(rows[number].messages)
    return chats


def _turn_marks(tokenizer: Any) -> frozenset[str]:
    """The texts that begin and end turns: those of well-known families, and the control tokens of this template."""
    written = ""
    if tokenizer.chat_template is not None:
        with suppress(UserError):
            written = _text((ASKED, ANSWER, ASKED), tokenizer, {})
    return frozenset({*TURNS, *(text for text in control_texts(tokenizer) if text in written)})


def _rendered_rows(chats: Sequence[Sequence[Message]], turns: Iterable[str]) -> list[str]:
    """A warning if rows contain control tokens of a turn, because a template has already rendered them."""
    pattern = re.compile("|".join(map(re.escape, sorted(turns, key=len, reverse=True))))
    found = [pattern.search(_contents(chat)) for chat in chats]
    marks = [mark for mark in found if mark]
    if not marks:
        return []
    what = f"{len(marks)} of {len(chats)} rows read hold the control token {marks[0][0]} in their text"
    why = "it is plain text there, within a turn of the chat template"
    remedy = "if these chats are rendered already, name their column in task.prompt, or map task.messages to chats"
    return [f"{what}: {why}; {remedy}"]


def _spelt_tokens(tokenizer: Any, chats: Sequence[Sequence[Message]], turns: frozenset[str]) -> list[str]:
    """A warning if messages contain other tags that are control tokens, and are then spelt out."""
    if tokenizer.chat_template is None:
        return []
    named = {getattr(tokenizer, f"{name}_token", None) for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")}
    tags = [text for text in control_texts(tokenizer) if TAG.fullmatch(text) and text not in turns | named]
    texts = list(map(_contents, chats))
    counts = {tag: sum(tag in text for text in texts) for tag in tags}
    if not any(counts.values()):
        return []

    def first_place(tag: str) -> int:
        return min(text.find(tag) for text in texts if tag in text)

    held = sorted((tag for tag in tags if counts[tag]), key=first_place)
    listed = ", ".join(f"{tag} ({counts[tag]} of {len(chats)} rows read)" for tag in held)
    spelt = len(encode_part(with_stand_ins(held[0], tokenizer), tokenizer))
    what = f"control tokens of the tokenizer are spelt out in the text of messages: {listed}"
    why = f"{held[0]} becomes {spelt} ordinary tokens, because only the chat template may write a control token"
    remedy = 'to have a tag read and trained as its token, set "special": false for it in tokenizer.json'
    return [f"{what}; {why}; {remedy}"]


def _contents(chat: Sequence[Message]) -> str:
    return "\n".join(str(message["content"]) for message in chat)


def stop_note(
    tokenizer: Any,
    stops: Sequence[int],
    stop_texts: Sequence[str],
    *,
    stop: str = "sampling.stop=[{!r:.60}]",
    limit: str = "sampling.max_tokens",
) -> list[str]:
    """A warning if the token with which the chat template ends a turn does not end an answer by the model's own files.
    `stop` and `limit` name the settings in the warning: the one that sets a stop string, and the one that otherwise
    ends an answer."""
    end = turn_end(tokenizer)
    if end is None or end.token in stops or any(text in end.text for text in stop_texts):
        return []
    named = ", ".join(tokenizer.convert_ids_to_tokens(list(stops))) or "no token"
    if end.token is not None:
        token = tokenizer.convert_ids_to_tokens(end.token)
        ids = [*stops, end.token]
        what = f"the chat template ends turns with {token}, and the model's files stop only at {named}"
        remedy = f"for other engines, set eos_token_id in its generation_config.json to {ids}"
        return [f"{what}: here completions stop at both; {remedy}"]
    if not end.text:
        what = f"the chat template writes nothing after an answer: completions end at {named} or {limit}"
        return [f"{what}; repair the template, or name a text in {stop.partition('=')[0]}"]
    what = f"the chat template ends turns with the text {end.text!r:.60}, and completions go on after it"
    return [f"{what}, to {named} or {limit}; set {stop.format(end.text.splitlines()[0])}"]


def system_note(tokenizer: Any, arguments: Mapping[str, Any]) -> list[str]:
    """A warning if the chat template has no role for a system prompt."""
    try:
        chat, plain = (_text(messages, tokenizer, arguments) for messages in ((SYSTEM, ASKED), (ASKED,)))
    except UserError:  # said where a row is rendered
        return []
    if SYSTEM["content"] not in chat:
        remedy = "set data.system=null, and put that text into the question"
        return [f"the chat template drops the system prompt: the model never sees it; {remedy}"]
    if chat.partition(SYSTEM["content"])[0] == plain.partition(ASKED["content"])[0]:
        return ["the chat template has no system role: it writes the system prompt into the user's message"]
    return []


def _text(messages: Sequence[Message], tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    return render_chat([SafeMessage(message, tokenizer) for message in messages], tokenizer, arguments)
