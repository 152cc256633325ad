"""Builds preference pairs, and completions with a label, from rows: their columns, and their conversion to tokens.

A side is a text, or a list of messages that ends with one of the assistant. The prompt is that of the row; the messages
of a side before its last equal it, or begin with it and go on with further turns: of these, those of the assistant are
trained. Where the row's messages are one of the sides, the prompt is what both sides begin with. Text of the assistant
at the prompt's end begins each side. A bad row raises `FieldError`, which names the column's field; the caller adds the
number of the row, and skips or refuses it.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np

from proxima.data import FieldError, OverLengthError, UserError, require
from proxima.data.columns import LARGEST, Bools
from proxima.data.flow import Message
from proxima.data.pairs import LabeledCompletion, PreferencePair
from proxima.data.trajectory import Trajectory
from proxima.model.chat import Tokenizer, is_begun, prompt_tokens
from proxima.model.chat_answer import answer_excerpt, answer_tokens, row_excerpt
from proxima.task.chat_rows import turn_tokens
from proxima.task.prompts import row_arguments, row_messages
from proxima.task.protocol import Row
from proxima.task.published_chats import as_messages
from proxima.task.template import look_up

_CHAT_AS_TEXT = re.compile(r'\s*\[\s*\{\s*"(?:role|content|from|value)"\s*:')
_LABELS = {"true": True, "false": False, "1": 1, "0": 0}  # as texts


@dataclass(frozen=True, kw_only=True)
class PairColumns:
    """The columns of pairs, among the `metadata` that the task keeps; dots in a name lead into a column of objects.

    Args:
        chosen, rejected: the better and the worse completion: text, or a list of {role, content}. If both are whole
            chats and the data has no column with the prompt, set the task's `messages` to one of the two.
        margin: by how much the chosen one is better, a number; null: not in the data.
    """

    chosen: str = "chosen"
    rejected: str = "rejected"
    margin: str | None = None


@dataclass(frozen=True, kw_only=True)
class LabelColumns:
    """The columns of completions without a partner; see `PairColumns` for names.

    Args:
        completion: text, or a list of {role, content}. label: true or 1 for a good one, false or 0 for a bad one.
    """

    completion: str = "completion"
    label: str = "label"


@dataclass(frozen=True, kw_only=True)
class PreferenceReader:
    """Converts rows to tokens, through the chat template like `PromptSource`.

    Args:
        tokenizer: the policy's. system, arguments: system prompt and template arguments, see `PromptSource`.
        context: most tokens of prompt and completion together; a longer one is a bad row, and is never cut.
    """

    tokenizer: Tokenizer
    context: int
    system: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def pair(self, number: int, row: Row, columns: PairColumns) -> PreferencePair:
        """Return the pair of a row; `number` is the row's.

        Raises:
            FieldError: `chosen` or `rejected`: no such column, empty, not a chat, without end-of-turn token, too long
                (`OverLengthError`), another prompt than the row's, or equal sides; `margin`: not a finite number.
        """
        sides = {"chosen": _side(row, "chosen", columns.chosen), "rejected": _side(row, "rejected", columns.rejected)}
        prompt, (better, worse) = _split(row, sides)
        row = replace(row, messages=prompt)
        margin = None if columns.margin is None else _number(_column(row, "margin", columns.margin))
        chosen = self._trajectory(number, 0, row, "chosen", better)
        rejected = self._trajectory(number, 1, row, "rejected", worse)
        equal = np.array_equal(chosen.tokens, rejected.tokens)
        require(not equal, "rejected", answer_excerpt(worse[-1]), "equals chosen: the pair says nothing")
        return PreferencePair(row=number, chosen=chosen, rejected=rejected, margin=margin)

    def labeled(self, number: int, row: Row, columns: LabelColumns) -> LabeledCompletion:
        """Return the completion of a row, with its label; raises like `pair`, and for a label that is not true, false,
        1 or 0."""
        side = _side(row, "completion", columns.completion)
        label = _column(row, "label", columns.label)
        if isinstance(label, str):  # of a CSV file
            label = _LABELS.get(label.strip().lower(), label)
        require(isinstance(label, int) and label in (0, 1), "label", label, "must be true, false, 1 or 0")
        prompt, (said,) = _split(row, {"completion": side})
        completion = self._trajectory(number, 0, replace(row, messages=prompt), "completion", said)
        return LabeledCompletion(row=number, completion=completion, good=bool(label))

    def _trajectory(self, number: int, sample: int, row: Row, field: str, said: Sequence[Message]) -> Trajectory:
        """The trajectory of a side: of its messages after the prompt, the last is the assistant's."""
        answer, shown = said[-1], answer_excerpt(said[-1])
        for message in said:
            spoken = message["role"] != "assistant" or message["content"].strip() or message.get("tool_calls")
            require(bool(spoken), field, message["content"], "is empty")
        turns = [i for i, message in enumerate(said) if message["role"] == "assistant" and message.get("weight", 1)]
        require(bool(turns), field, shown, "has weight 0: nothing of it would be trained")
        arguments = row_arguments(row, self.arguments, self.tokenizer)
        require(bool(row.messages), field, shown, "follows no prompt", remedy="map task.question to the prompt")
        chat = row_messages(row, self.system, self.tokenizer)
        mask: Bools | None = None
        if len(said) == 1:
            before = prompt_tokens(chat, self.tokenizer, arguments)
            tokens = answer_tokens(chat, answer, self.tokenizer, arguments, field)
        else:
            remedy = "repair the template, or remove the earlier turns"
            places = [len(chat) + turn for turn in turns]
            parts = turn_tokens((*chat, *said), places, self.tokenizer, arguments, field, remedy)
            before, tokens, mask = (
                np.array(part, of) for part, of in zip(parts, (np.int32, np.int32, np.bool_), strict=True)
            )
        used = len(before) + len(tokens)
        if used > self.context:
            reason = f"has no room: with its prompt it has {used} tokens, the model holds {self.context}"
            raise OverLengthError(field, shown, reason, remedy="shorten it or raise model.max_length")
        return Trajectory(sample=sample, group=number, prompt_tokens=before, tokens=tokens, loss_mask=mask)


Side = tuple[Message, ...]  # the messages of a side, the last of them the assistant's


def _side(row: Row, field: str, column: str) -> Side:
    """Return the messages in a column; a text is one of the assistant."""
    value = _column(row, field, column)
    if isinstance(value, str):
        is_text = _CHAT_AS_TEXT.match(value) is None
        remedy = f"set task.json_columns=[{column.partition('.')[0]}]"
        require(is_text, field, row_excerpt(value), "holds a list of messages as JSON text", remedy=remedy)
        return ({"role": "assistant", "content": value},)
    try:
        chat = as_messages(value, f"column {column!r}", fills_nulls=row.fills_nulls)
    except UserError as error:
        raise FieldError(field, row_excerpt(value), f"is not a chat: {error.reason}", remedy=error.remedy) from None
    require(chat[-1]["role"] == "assistant", field, row_excerpt(value), "must end with a message of the assistant")
    return chat


def _split(row: Row, sides: Mapping[str, Side]) -> tuple[tuple[Message, ...], list[Side]]:
    """Return the prompt of the sides, and the messages of each after it."""
    prompts = ((), row.messages, row.messages[:-1]) if is_begun(row.messages) else ((), row.messages)
    if all(chat[:-1] in prompts for chat in sides.values()):
        return _prompt(row, list(sides.values())), [chat[-1:] for chat in sides.values()]
    prompt = row.messages
    if is_begun(prompt):  # it is one of the sides
        pairs = takewhile(lambda pair: all(message == pair[0] for message in pair), zip(*sides.values(), strict=False))
        prompt = prompt[: min(sum(1 for _ in pairs), *(len(chat) - 1 for chat in sides.values()))]
    rest = [chat[len(prompt) :] if chat[: len(prompt)] == prompt else chat for chat in sides.values()]
    remedy = "map task.question or task.messages to the prompt, or task.messages to one of the chats"
    for (name, chat), said in zip(sides.items(), rest, strict=True):
        answers = bool(said) and said[0]["role"] == "assistant"
        shown = row_excerpt([dict(message) for message in chat])
        require(answers, name, shown, "begins with another prompt than its row", remedy=remedy)
    return prompt, rest


def _prompt(row: Row, sides: Sequence[Side]) -> tuple[Message, ...]:
    """Return the messages before the completions. The task's `messages` may be one of the sides, or another answer to
    the same prompt, rather than a prompt."""
    *before, last = row.messages
    if not is_begun(row.messages):
        return row.messages
    is_answer = any(
        chat[-1]["content"] == last["content"] or (chat[:-1] and chat[:-1] == tuple(before)) for chat in sides
    )
    return tuple(before) if is_answer else row.messages


def _column(row: Row, field: str, column: str) -> Any:
    try:
        return look_up(row.metadata, column)
    except KeyError:
        names = ", ".join(row.metadata) or "none"
        remedy = f"map it to another column, of {names}"
        raise FieldError(field, column, f"names no column of the row: {column!r}", remedy=remedy) from None


def _number(margin: Any) -> float:
    value = margin
    if isinstance(margin, str):  # of a CSV file
        with suppress(ValueError):
            value = float(margin)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
    require(number, "margin", margin, "must be a finite number of float32")
    return float(value)
