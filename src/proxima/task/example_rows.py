"""Converts rows to training examples: chats for SFT, preference pairs, and completions with a label.

A side of a pair is a text, or a list of messages that ends with one of the assistant. The prompt is that of the row. A
side's messages before the last equal the prompt, or begin with it and continue with further turns, of which those of
the assistant are trained. If the row's messages are one of the sides, the prompt is the common beginning of both sides.
If the prompt ends with text of the assistant, that text begins each side.

A bad row raises `FieldError`, which names the part or the column of the row; the caller adds the row's number, and
skips or refuses the row.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from proxima.data import FieldError, OverLengthError, UserError, require
from proxima.data.columns import LARGEST
from proxima.data.flow import Message
from proxima.data.trajectory import ChatExample, LabeledCompletion, PreferencePair, Trajectory
from proxima.model.chat.answer import answer_excerpt, answer_tokens, row_excerpt
from proxima.model.chat.encode import Tokenizer, is_begun, prompt_tokens
from proxima.task.prompts import row_arguments, row_messages
from proxima.task.protocol import Row
from proxima.task.published_chats import as_messages
from proxima.task.template import fill, look_up, template_fields

_CHAT_AS_TEXT = re.compile(r'\s*\[\s*\{\s*"(?:role|content|from|value)"\s*:')
_LABELS = {"true": True, "false": False, "1": 1, "0": 0}  # as texts


@dataclass(frozen=True, kw_only=True)
class ChatReader:
    """Converts rows to tokens with a loss mask, through the chat template like `PromptSource`.

    If a row's messages end with one of the assistant, they are the whole chat. Otherwise a completion is appended: the
    template `completion` filled with the row's columns, or the row's answer. A turn is everything that the assistant
    wrote: thought, text and tool calls. A turn whose message has `weight: 0` is context.

    Each trained turn has the tokens that an engine would have generated there: those of `completion_tokens`, including
    the end-of-turn token, after those of `prompt_tokens`. Everything else is context without loss. Where a chat
    template renders earlier turns anew, as without their thoughts, a turn begins another path of the example.

    Args:
        tokenizer: the model's.
        context: most tokens of an example.
        loss_on: `completion`: the last turn of the assistant; `all_turns`: all of its turns.
        completion: template over the row's metadata and `answer`; None: the answer.
        truncate: cut off tokens beyond the context instead of refusing the row.
        system, arguments: system prompt and template arguments, see `PromptSource`.
    """

    tokenizer: Tokenizer
    context: int
    loss_on: Literal["completion", "all_turns"] = "completion"
    completion: str | None = None
    truncate: bool = False
    system: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def example(self, number: int, row: Row) -> Trajectory:
        """Return the only path of a row; raises like `paths`, and FieldError for a row of several."""
        paths = self.paths(number, row)
        if len(paths) > 1:
            what = f"has {len(paths)} paths: the chat template renders earlier turns differently"
            raise FieldError("messages", answer_excerpt(row.messages[-1]), what, remedy="read its `paths`")
        return paths[0]

    def paths(self, number: int, row: Row) -> tuple[Trajectory, ...]:
        """Return the tokens of a row, with the trained ones in `loss_mask`, as the paths of a `ChatExample`; `number`,
        that of the row, becomes the group.

        Raises:
            FieldError: names `completion` or `messages`: it is absent or empty, has no turn of the assistant, or the
                chat template gives a turn other tokens than an engine would generate.
            OverLengthError: a path exceeds the context, and `truncate` is off or leaves nothing to train.
        """
        chat = self.chat(row)
        arguments = row_arguments(row, self.arguments, self.tokenizer)
        written = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
        if self.loss_on == "completion":
            written = written[-1:]
        trained = [i for i in written if chat[i].get("weight", 1)]
        if not trained:
            what = "has weight 0, and nothing else would be trained"
            if len(written) > 1:
                what = "has weight 0 in all turns of the assistant"
            raise FieldError("messages", answer_excerpt(chat[written[-1]]), what, remedy="remove the row")
        turns = turn_paths(chat, trained, self.tokenizer, arguments, "completion")
        cut = [self._cut(number, sample, path, chat) for sample, path in enumerate(turns)]
        paths = tuple(path for path in cut if path is not None)
        if not paths:
            used = max(len(path.prompt) + len(path.tokens) for path in turns)
            what = f"has {used} tokens, the model holds {self.context}, and no trained token fits"
            remedy = "shorten it, or raise model.max_length"
            raise OverLengthError("messages", answer_excerpt(chat[-1]), what, remedy=remedy)
        return paths

    def chat(self, row: Row) -> tuple[Message, ...]:
        """Return the row as a chat that ends with the assistant's turn, system prompt included; raises like
        `example`."""
        messages = row_messages(row, self.system, self.tokenizer)
        if messages[-1]["role"] != "assistant":
            messages = (*messages, {"role": "assistant", "content": self._completion(row)})
        elif self.completion is not None:
            what = "ends with the assistant, and sft.completion would be one more turn of it"
            remedy = "set sft.completion=null, or map task.messages to chats that end with the user"
            raise FieldError("messages", answer_excerpt(messages[-1]), what, remedy=remedy)
        refuse_turns_in_a_row("messages", messages)
        for message in messages:
            if message["role"] == "assistant":
                name = "completion" if message is messages[-1] else "messages"
                has_content = bool(message["content"].strip() or message.get("tool_calls"))
                require(has_content, name, message["content"], "is empty")
        return messages

    def _completion(self, row: Row) -> str:
        if self.completion is not None:
            columns = dict(row.metadata)
            if row.answer is not None or "answer" not in columns:
                columns["answer"] = row.answer
            try:
                for name in sorted(template_fields(self.completion, "completion")):
                    present = look_up(columns, name) is not None
                    require(present, "completion", self.completion, f"has no text: the row's {name!r} is null")
                return fill(self.completion, columns)
            except KeyError as error:
                names = ", ".join(columns)
                what = f"names a column that the row lacks: {error.args[0]!r}"
                remedy = f"change sft.completion; columns: {names}"
                raise FieldError("completion", self.completion, what, remedy=remedy) from None
        if isinstance(row.answer, int | float) and not isinstance(row.answer, bool):
            return str(row.answer)
        if not isinstance(row.answer, str):
            remedy = "map task.answer, or task.messages to whole chats, or set sft.completion to a template"
            raise FieldError("completion", row.answer, "is missing: the row ends with its prompt", remedy=remedy)
        return row.answer

    def _cut(self, number: int, sample: int, path: "TurnPath", chat: Sequence[Message]) -> Trajectory | None:
        """Return the trajectory, cut to the context if `truncate` is set; None if no trained token fits."""
        room = self.context - len(path.prompt)
        tokens = path.tokens
        mask = path.mask
        if len(tokens) > room:
            if not self.truncate:
                what = f"has {len(path.prompt) + len(tokens)} tokens, the model holds {self.context}"
                remedy = "shorten it, raise model.max_length, or set data.over_length=truncate"
                raise OverLengthError("messages", answer_excerpt(chat[-1]), what, remedy=remedy)
            tokens = tokens[: max(0, room)]
            mask = mask[: max(0, room)]
            if not any(mask):
                return None
        return Trajectory(
            group=number,
            sample=sample,
            prompt_tokens=np.array(path.prompt, np.int32),
            tokens=np.array(tokens, np.int32),
            loss_mask=np.array(mask, np.bool_),
        )


def refuse_turns_in_a_row(field: str, chat: Sequence[Message]) -> None:
    """Raise FieldError if a message of the assistant follows another one: a template writes two turns, and an engine
    that is shown the first goes on with it. With weight 0 the first is the beginning of the second."""
    for before, message in pairwise(chat):
        in_a_row = before["role"] == message["role"] == "assistant" and before.get("weight", 1)
        what = "is the second message of the assistant in a row, which an engine would never have begun"
        remedy = "join the two messages, or give the first weight 0: the second then continues it"
        require(not in_a_row, field, answer_excerpt(message), what, remedy=remedy)


@dataclass
class TurnPath:
    """The tokens of a chat up to the last of some trained turns: `prompt`, `tokens`, and which of the latter are
    trained."""

    prompt: list[int]
    tokens: list[int]
    mask: list[bool]

    @property
    def whole(self) -> list[int]:
        return self.prompt + self.tokens

    def begins(self, context: list[int]) -> bool:
        """True if the context of a later turn continues this path."""
        return context[: len(self.prompt) + len(self.tokens)] == self.whole

    def add(self, context: list[int], answer: list[int]) -> None:
        """Add what a later turn follows, and the turn."""
        between = context[len(self.prompt) + len(self.tokens) :]
        self.tokens += between
        self.mask += [False] * len(between)
        self.tokens += answer
        self.mask += [True] * len(answer)

    def starting_at(self, place: int) -> "TurnPath":
        """The same path with a prompt of `place` tokens."""
        moved = self.prompt[place:]
        return TurnPath(self.prompt[:place], moved + self.tokens, [False] * len(moved) + self.mask)


def turn_paths(
    chat: Sequence[Message], turns: Sequence[int], tokenizer: Tokenizer, arguments: Mapping[str, Any], field: str
) -> list[TurnPath]:
    """Return the paths on which these turns of the assistant are trained, each on one, in their order. A turn continues
    the path of the one before it if its context begins with that path; otherwise it begins another. All have the same
    prompt: what the first turns of all paths begin with.

    Args:
        field: names the turns in errors.

    Raises:
        FieldError: nothing precedes the first turn, or a turn's tokens differ from those that an engine would generate.
    """
    paths = list[TurnPath]()
    for turn in turns:
        prompt = chat[:turn]
        shown = answer_excerpt(chat[turn])
        require(bool(prompt), "messages", shown, "begins with the assistant: nothing predicts its first token")
        context = prompt_tokens(prompt, tokenizer, arguments).tolist()
        answer = answer_tokens(prompt, chat[turn], tokenizer, arguments, field).tolist()
        if not paths or not paths[-1].begins(context):
            paths.append(TurnPath(context, [], []))
        paths[-1].add(context, answer)
    shared = shared_prompt(paths)
    what = "is rendered by the chat template with another first token than the turns before it"
    require(shared > 0, "messages", answer_excerpt(chat[turns[-1]]), what)
    return [path.starting_at(shared) for path in paths]


def shared_prompt(paths: Sequence[TurnPath]) -> int:
    """The number of tokens with which the prompts of all paths begin."""
    return common_length([path.prompt for path in paths])


def common_length(sequences: Sequence[Sequence[int]]) -> int:
    """The number of leading tokens that are the same in all sequences."""
    shared = 0
    for ids in zip(*sequences, strict=False):
        if len(set(ids)) > 1:
            break
        shared += 1
    return shared


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
    """The columns of labeled completions; see `PairColumns` for names.

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
        context: most tokens of prompt and completion together; longer rows are refused, never cut.
    """

    tokenizer: Tokenizer
    context: int
    system: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def pair(self, number: int, row: Row, columns: PairColumns) -> PreferencePair:
        """Return the pair of a row; `number` is that of the row.

        Raises:
            FieldError: names `chosen` or `rejected`: the column is missing or empty, is not a chat, lacks the
                end-of-turn token, is too long (`OverLengthError`), has another prompt than the row, or equals the other
                side; or `margin`: it is not a finite number.
        """
        sides = {"chosen": _side(row, "chosen", columns.chosen), "rejected": _side(row, "rejected", columns.rejected)}
        prompt, (better, worse) = _split(row, sides)
        row = replace(row, messages=prompt)
        margin = None
        if columns.margin is not None:
            margin = _number(_column(row, "margin", columns.margin))
        chosen = self._paths(row, "chosen", better)
        rejected = self._paths(row, "rejected", worse)
        shared = shared_prompt([*chosen, *rejected])
        equal = [path.whole for path in chosen] == [path.whole for path in rejected]
        require(not equal, "rejected", answer_excerpt(worse[-1]), "equals chosen: the pair says nothing")
        return PreferencePair(
            row=number,
            chosen=self._example(number, 0, chosen, shared),
            rejected=self._example(number, 1, rejected, shared),
            margin=margin,
        )

    def labeled(self, number: int, row: Row, columns: LabelColumns) -> LabeledCompletion:
        """Return the labeled completion of a row; raises like `pair`, and for a label that is not true, false, 1 or
        0."""
        side = _side(row, "completion", columns.completion)
        label = _column(row, "label", columns.label)
        if isinstance(label, str):  # of a CSV file
            label = _LABELS.get(label.strip().lower(), label)
        require(isinstance(label, int) and label in (0, 1), "label", label, "must be true, false, 1 or 0")
        prompt, (said,) = _split(row, {"completion": side})
        paths = self._paths(replace(row, messages=prompt), "completion", said)
        completion = self._example(number, 0, paths, shared_prompt(paths))
        return LabeledCompletion(row=number, completion=completion, good=bool(label))

    def _paths(self, row: Row, field: str, said: Sequence[Message]) -> list["TurnPath"]:
        """The paths of a side: of its messages after the prompt, the last is the assistant's."""
        answer = said[-1]
        shown = answer_excerpt(said[-1])
        refuse_turns_in_a_row(field, said)
        for message in said:
            spoken = message["role"] != "assistant" or message["content"].strip() or message.get("tool_calls")
            require(bool(spoken), field, message["content"], "is empty")
        turns = [i for i, message in enumerate(said) if message["role"] == "assistant" and message.get("weight", 1)]
        require(bool(turns), field, shown, "has weight 0: nothing of it would be trained")
        arguments = row_arguments(row, self.arguments, self.tokenizer)
        require(bool(row.messages), field, shown, "follows no prompt", remedy="map task.question to the prompt")
        chat = row_messages(row, self.system, self.tokenizer)
        if len(said) == 1:
            before = prompt_tokens(chat, self.tokenizer, arguments).tolist()
            tokens = answer_tokens(chat, answer, self.tokenizer, arguments, field).tolist()
            paths = [TurnPath(before, tokens, [True] * len(tokens))]
        else:
            places = [len(chat) + turn for turn in turns]
            paths = turn_paths((*chat, *said), places, self.tokenizer, arguments, field)
            asked = prompt_tokens(chat, self.tokenizer, arguments).tolist()
            shared = common_length([asked, *(path.whole for path in paths)])
            paths = [path.starting_at(shared) for path in paths]  # both sides have the same prompt
        used = max(len(path.whole) for path in paths)
        if used > self.context:
            reason = f"does not fit: with its prompt it has {used} tokens, the model holds {self.context}"
            raise OverLengthError(field, shown, reason, remedy="shorten it or raise model.max_length")
        return paths

    def _example(self, number: int, sample: int, paths: Sequence["TurnPath"], shared: int) -> Trajectory | ChatExample:
        """The trajectory of a side, or its paths, with a prompt of `shared` tokens."""
        made = []
        for turn, path in enumerate(paths):
            moved = path.starting_at(shared)
            trajectory = Trajectory(
                group=number,
                sample=sample,
                turn=turn,
                prompt_tokens=np.array(moved.prompt, np.int32),
                tokens=np.array(moved.tokens, np.int32),
                loss_mask=np.array(moved.mask, np.bool_),
            )
            made.append(trajectory)
        if len(made) == 1:
            return made[0]
        return ChatExample(row=number, paths=tuple(made))


Side = tuple[Message, ...]  # the messages of a side, the last of them the assistant's


def _side(row: Row, field: str, column: str) -> Side:
    """Return the messages in a column; a text is a message of the assistant."""
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
    chats = list(sides.values())
    begun = is_begun(row.messages)
    prompts = [(), row.messages]
    if begun:
        prompts.append(row.messages[:-1])
    if all(chat[:-1] in prompts for chat in chats):
        return _prompt(row, chats), [chat[-1:] for chat in chats]
    prompt = row.messages
    if begun:  # it is one of the sides
        prompt = prompt[: _common_messages(chats)]
    rest = [_after(prompt, chat) for chat in chats]
    remedy = "map task.question or task.messages to the prompt, or task.messages to one of the chats"
    for (name, chat), said in zip(sides.items(), rest, strict=True):
        answers = bool(said) and said[0]["role"] == "assistant"
        shown = row_excerpt([dict(message) for message in chat])
        require(answers, name, shown, "begins with another prompt than its row", remedy=remedy)
    return prompt, rest


def _common_messages(chats: Sequence[Side]) -> int:
    """The number of messages with which all chats begin, without the last one of any."""
    common = 0
    for messages in zip(*(chat[:-1] for chat in chats), strict=False):
        if any(message != messages[0] for message in messages):
            break
        common += 1
    return common


def _after(prompt: tuple[Message, ...], chat: Side) -> Side:
    """The messages of a chat after the prompt, if it begins with it; else the whole chat."""
    if chat[: len(prompt)] == prompt:
        return chat[len(prompt) :]
    return chat


def _prompt(row: Row, sides: Sequence[Side]) -> tuple[Message, ...]:
    """Return the messages before the completions. The task's `messages` may be one of the sides, or another answer to
    the same prompt, instead of a prompt."""
    if not is_begun(row.messages):
        return row.messages
    before = row.messages[:-1]
    content = row.messages[-1]["content"]
    for chat in sides:
        if chat[-1]["content"] == content or (before and chat[:-1] == before):
            return before
    return row.messages


def _column(row: Row, field: str, column: str) -> Any:
    try:
        return look_up(row.metadata, column)
    except KeyError:
        names = ", ".join(row.metadata) or "none"
        remedy = f"map it to another column, of {names}"
        raise FieldError(field, column, f"names a column that the row lacks: {column!r}", remedy=remedy) from None


def _number(margin: Any) -> float:
    value = margin
    if isinstance(margin, str):  # of a CSV file
        with suppress(ValueError):
            value = float(margin)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
    require(number, "margin", margin, "must be a finite number of float32")
    return float(value)
