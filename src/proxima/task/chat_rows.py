"""Builds training examples for supervised fine-tuning from rows: whole chats, or a prompt and its completion.

A bad row raises `FieldError`, which names the part of the row; the caller adds the number of the row, and skips or
refuses it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from proxima.data import FieldError, OverLengthError, require
from proxima.data.flow import Message
from proxima.data.trajectory import Trajectory
from proxima.model.chat import Tokenizer, prompt_tokens
from proxima.model.chat_answer import answer_excerpt, answer_tokens
from proxima.task.prompts import row_arguments, row_messages
from proxima.task.protocol import Row
from proxima.task.template import fill, look_up, template_fields


@dataclass(frozen=True, kw_only=True)
class ChatReader:
    """Converts rows to tokens with a loss mask, through the chat template like `PromptSource`.

    A row whose messages end with one of the assistant is the whole chat. Otherwise a completion is appended to its
    messages: the template `completion` filled with the row's columns, or the row's answer. A turn is all that the
    assistant wrote: thought, text and tool calls. A turn whose message has `weight: 0` is context.

    Each trained turn has the tokens that an engine would have generated there: those of `completion_tokens`, the
    end-of-turn token included, after those of `prompt_tokens`. Everything else is context without loss.

    Args:
        tokenizer: the model's.
        context: most tokens of an example.
        loss_on: `completion`: the last turn of the assistant; `all_turns`: all of its turns.
        completion: template over the row's metadata and `answer`; None: the answer.
        truncate: cut off tokens beyond the context, instead of refusing the row.
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
        """Return the tokens of a row, with the trained ones in `loss_mask`; `number`, the row's, becomes the group.

        Raises:
            FieldError: `completion` or `messages`: absent, empty, no turn of the assistant, or a chat template with
                which a turn's tokens differ from those that an engine would generate.
            OverLengthError: more tokens than the context, and `truncate` is off or leaves nothing to train.
        """
        chat, arguments = self.chat(row), row_arguments(row, self.arguments, self.tokenizer)
        written = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
        if self.loss_on == "completion":
            written = written[-1:]
        trained = [i for i in written if chat[i].get("weight", 1)]
        if not trained:
            what = "has weight 0, and nothing else would be trained"
            what = what if len(written) == 1 else "has weight 0 in all turns of the assistant"
            raise FieldError("messages", answer_excerpt(chat[written[-1]]), what, remedy="remove the row")
        remedy = "set sft.loss_on=completion, or repair the template"
        before, tokens, mask = turn_tokens(chat, trained, self.tokenizer, arguments, "completion", remedy)
        return self._cut(number, before, tokens, mask, chat)

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
        for message in messages:
            if message["role"] == "assistant":
                name = "completion" if message is messages[-1] else "messages"
                said = bool(message["content"].strip() or message.get("tool_calls"))
                require(said, name, message["content"], "is empty")
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
                what = f"names no column of the row: {error.args[0]!r}"
                remedy = f"change sft.completion; columns: {names}"
                raise FieldError("completion", self.completion, what, remedy=remedy) from None
        if isinstance(row.answer, int | float) and not isinstance(row.answer, bool):
            return str(row.answer)
        if not isinstance(row.answer, str):
            remedy = "map task.answer, or task.messages to whole chats, or set sft.completion to a template"
            raise FieldError("completion", row.answer, "is missing: the row ends with its prompt", remedy=remedy)
        return row.answer

    def _cut(
        self, number: int, before: list[int], tokens: list[int], mask: list[bool], chat: Sequence[Message]
    ) -> Trajectory:
        """Return the trajectory, cut to the context if `truncate` is set."""
        room = self.context - len(before)
        if len(tokens) > room:
            used, text = len(before) + len(tokens), answer_excerpt(chat[-1])
            limit = f"the model holds {self.context}"
            remedy = "shorten it, raise model.max_length, or set data.over_length=truncate"
            if not self.truncate:
                raise OverLengthError("messages", text, f"has {used} tokens, {limit}", remedy=remedy)
            tokens, mask = tokens[: max(0, room)], mask[: max(0, room)]
            if not any(mask):
                what = f"has {used} tokens, {limit}, and nothing that is trained is among these"
                raise OverLengthError("messages", text, what, remedy="shorten it, or raise model.max_length")
        ids, learnt = np.array(tokens, np.int32), np.array(mask, np.bool_)
        return Trajectory(group=number, prompt_tokens=np.array(before, np.int32), tokens=ids, loss_mask=learnt)


def turn_tokens(
    chat: Sequence[Message],
    turns: Sequence[int],
    tokenizer: Tokenizer,
    arguments: Mapping[str, Any],
    field: str,
    remedy: str,
) -> tuple[list[int], list[int], list[bool]]:
    """Return the tokens before the first of these turns of the assistant, those from there to the end of the last, and
    the mask of the tokens of the turns.

    Args:
        field: of the turns, for errors; remedy: if the template renders earlier turns differently.

    Raises:
        FieldError: nothing precedes the first turn, a turn's tokens differ from those that an engine would generate, or
            those of a turn do not begin with those of the turns before it.
    """
    before, tokens, mask = list[int](), list[int](), list[bool]()
    for turn in turns:
        prompt, shown = chat[:turn], answer_excerpt(chat[turn])
        require(bool(prompt), "messages", shown, "begins with the assistant: nothing predicts its first token")
        context = prompt_tokens(prompt, tokenizer, arguments).tolist()
        answer = answer_tokens(prompt, chat[turn], tokenizer, arguments, field).tolist()
        if not mask:
            before = context
        so_far = before + tokens
        if context[: len(so_far)] != so_far:
            what = f"the tokens of turn {turn} do not begin with those of the turns before it: the chat template "
            raise FieldError("messages", shown, what + "renders these differently", remedy=remedy)
        between = context[len(so_far) :]
        tokens, mask = tokens + between + answer, mask + [False] * len(between) + [True] * len(answer)
    return before, tokens, mask
