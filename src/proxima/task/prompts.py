"""Rows into prompts: system prompt, chat template, and what to do with one that is too long."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from proxima.data import FieldError, Message, Prompt, UserError, require
from proxima.data.columns import Ints
from proxima.task.cursor import Cursor, Draw
from proxima.task.protocol import Row, Rows


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def __call__(self, text: str, **options: Any) -> Any: ...


def with_system(messages: Sequence[Message], system: str | None) -> tuple[Message, ...]:
    """The chat with the system prompt before it, unless it has one of its own or `system` is None."""
    if system is None or any(message["role"] == "system" for message in messages):
        return tuple(messages)
    return ({"role": "system", "content": system}, *messages)


def prompt_tokens(messages: Sequence[Message], tokenizer: Tokenizer) -> Ints:
    """Token ids of a chat, ready for the answer.

    With a chat template: the template with its generation prompt; it adds the special tokens itself. Without one (a
    base model): the contents, one a line, and a final line end, with the special tokens that the tokenizer puts around
    a text. A special token at the end (some tokenizers append one) is dropped, because the answer goes on from there.
    """
    if tokenizer.chat_template is not None:
        ids = tokenizer.apply_chat_template(
            list(messages), tokenize=True, add_generation_prompt=True, return_dict=False
        )
        return np.array(ids, np.int32)
    text = "\n".join(message["content"] for message in messages) + "\n"
    ids = list(tokenizer(text)["input_ids"])
    end = getattr(tokenizer, "eos_token_id", None)
    if ids and end is not None and ids[-1] == end and len(ids) > 1:
        ids.pop()
    return np.array(ids, np.int32)


def to_prompt(row: Row, uid: int, tokenizer: Tokenizer, system: str | None = None) -> Prompt:
    """The prompt that a row makes."""
    messages = with_system(row.messages, system)
    return Prompt(
        uid=uid, messages=messages, tokens=prompt_tokens(messages, tokenizer), answer=row.answer, metadata=row.metadata
    )


class PromptSource:
    """Draws prompts in the cursor's order; a prompt that leaves no room for one new token is skipped or refused, never
    cut.

    Args:
        rows: the data of a task.
        tokenizer: the policy's.
        context: tokens, prompt and completion together, that the policy can hold; a prompt may have context - 1.
        cursor: the order; its uid becomes the prompt's.
        system: system prompt for rows that have none of their own; none: off.
        over_length: `skip` leaves a too long prompt out and counts it, `refuse` raises.

    `skipped` counts the draws left out so far, `longest` the tokens of the longest prompt drawn.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: Tokenizer,
        *,
        context: int,
        cursor: Cursor,
        system: str | None = None,
        over_length: Literal["skip", "refuse"] = "skip",
    ) -> None:
        require(context >= 2, "context", context, "must be >= 2 tokens: one of prompt and one to generate")
        require(over_length in ("skip", "refuse"), "over_length", over_length, "must be 'skip' or 'refuse'")
        require(cursor.size == len(rows), "cursor.size", cursor.size, f"must be the number of rows, {len(rows)}")
        self.rows, self.tokenizer, self.cursor = rows, tokenizer, cursor
        self.context, self.system, self.over_length = context, system, over_length
        self.skipped = 0
        self.longest = 0

    def next(self, n: int) -> list[Prompt]:
        """The next n prompts.

        Raises:
            ValueError: one is too long and `over_length` is `refuse`, or a whole epoch held none that fits.
        """
        prompts: list[Prompt] = []
        skipped_in_a_row = 0
        while len(prompts) < n:
            (draw,) = self.cursor.next(1)
            prompt = self.prompt(draw)
            if prompt is not None:
                prompts.append(prompt)
                skipped_in_a_row = 0
                continue
            self.skipped += 1
            skipped_in_a_row += 1
            if skipped_in_a_row >= self.cursor.size:
                raise UserError(f"data: none of the {self.cursor.size} prompts fits; {self._limit()}")
        return prompts

    def prompt(self, draw: Draw) -> Prompt | None:
        """The prompt of a draw, or None where it is too long and skipped; moves nothing."""
        prompt = to_prompt(self.rows[draw.index], draw.uid, self.tokenizer, self.system)
        self.longest = max(self.longest, len(prompt.tokens))
        if len(prompt.tokens) < self.context:
            return prompt
        if self.over_length == "refuse":
            reason = f"refuses row {draw.index}: its prompt has {len(prompt.tokens)} tokens"
            remedy = f"{self._limit()}, or set data.over_length=skip"
            raise FieldError("data.over_length", self.over_length, reason, remedy=remedy)
        return None

    def survey(self, limit: int = 0) -> int:
        """How many of the first `limit` rows (0: all) are too long; needs the tokenizer only, so it can run before
        weights are loaded.

        Raises:
            ValueError: as `next` does.
        """
        count = min(limit, len(self.rows)) if limit else len(self.rows)
        too_long = sum(self.prompt(Draw(uid=index, index=index, epoch=0)) is None for index in range(count))
        if too_long == len(self.rows):
            raise UserError(f"data: none of the {too_long} prompts fits; {self._limit()}")
        return too_long

    def state(self) -> dict[str, Any]:
        """JSON values from which `load` goes on."""
        return {"cursor": self.cursor.state(), "skipped": self.skipped}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; raises as `Cursor.load`."""
        self.cursor.load(state["cursor"])
        self.skipped = int(state["skipped"])

    def _limit(self) -> str:
        return (
            f"the model holds {self.context} tokens and one must be left to generate: shorten the rows or raise "
            "model.max_length"
        )
