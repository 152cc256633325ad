"""Builds prompts from rows in the order of a cursor: adds the system prompt, applies the chat template, skips prompts
that are too long."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from proxima.data import FieldError, UserError, require
from proxima.data.columns import Ints
from proxima.data.errors import counted
from proxima.data.flow import Message, Prompt
from proxima.data.image_tokens import outside_image
from proxima.data.pending import Judgement
from proxima.data.random import permutation
from proxima.model.chat.encode import Tokenizer, image_store_of, rendered_text, safe_value
from proxima.model.chat.template_inputs import unread, unwritten_keys
from proxima.model.chat.written_text import prompt_and_beginning
from proxima.model.images.image_store import ImageStore
from proxima.task.image_files import open_image
from proxima.task.protocol import Row, Rows
from proxima.task.question_pool import PooledQuestions

PREFIX_STEP = 64  # shared prefixes are counted in steps of this many tokens, so that chance matches don't count
EXAMPLES = 8  # rows that prompts are compared with
ROUNDING = 1e-9  # of a sum of chances
NOTED_ROWS = 1000  # the rows that are searched for keys of messages that the template does not write


def with_system(messages: Sequence[Message], system: str | None) -> tuple[Message, ...]:
    """Return the chat with the system prompt in front, unless it has its own or `system` is None. FieldError if the
    chat is a raw text without a chat template."""
    if system is not None and any(message.get("raw") for message in messages):
        remedy = "set data.system=null, or task.question to the column, for a turn in the chat template"
        raise FieldError("data.system", system, "has no place in a prompt without a chat template", remedy=remedy)
    if system is None or any(message["role"] == "system" for message in messages):
        return tuple(messages)
    return ({"role": "system", "content": system}, *messages)


def row_messages(row: Row, system: str | None, tokenizer: Tokenizer) -> tuple[Message, ...]:
    """The chat of a row as the model reads it: `with_system`, with its images stored and numbered.

    Raises:
        UserError: an image can't be read or shown, or the row has images although its task declares none.
    """
    chat = with_system(row.messages, system)
    if not row.images:
        return chat
    store: ImageStore | None = image_store_of(tokenizer)
    if store is None:
        raise UserError("the row has images, and its task does not say so", remedy="give its class images = True")

    try:
        return store.numbered(chat, [open_image(image) for image in row.images])
    except UserError as error:
        raise FieldError("images", len(row.images), f"can't be shown: {error.reason}", remedy=error.remedy) from None


def row_arguments(row: Row, arguments: Mapping[str, Any], tokenizer: Tokenizer) -> Mapping[str, Any]:
    """The variables of the chat template for a row: its own take precedence over the recipe's. Control tokens in them
    are read as text.

    Raises:
        FieldError: the template does not read one of the row's variables.
    """
    if not row.arguments:
        return arguments

    for name in unread(tokenizer, row.arguments):
        if name == "tools":
            field = "tool_schemas"
        else:
            field = f"template_arguments.{name}"
        shown = "tools" if name == "tools" else row.arguments[name]
        what = "holds what the model's chat template does not read"
        remedy = f"set task.{field.partition('.')[0]}=null to leave it out, or use a model whose template reads {name}"
        raise FieldError(field, shown, what, remedy=remedy)
    return {**arguments, **safe_value(row.arguments, tokenizer)}


def key_notes(name: str, rows: Rows, tokenizer: Tokenizer, arguments: Mapping[str, Any]) -> list[str]:
    """A warning if messages of the first rows have keys that the chat template does not write."""
    unwritten = Counter[tuple[str, str]]()
    read = min(len(rows), NOTED_ROWS)
    render = partial(rendered_text, tokenizer)
    for number in range(read):
        with suppress(UserError):  # such a row is skipped or refused when it is used
            row = rows[number]
            if row.chat:
                own_arguments = row_arguments(row, arguments, tokenizer)
                unwritten.update(unwritten_keys(row.messages, tokenizer, own_arguments, render))
    if not unwritten:
        return []
    listed = ", ".join(f"{key} of role {role} ({count:,})" for (role, key), count in unwritten.most_common())
    if read == len(rows):
        of = counted(read, "row")
    else:
        of = f"the first {read:,} of {len(rows):,} rows"
    return [f"{name}: the chat template writes none of these keys of messages, in {of}: {listed}"]


def to_prompt(
    row: Row,
    uid: int,
    tokenizer: Tokenizer,
    system: str | None = None,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> Prompt:
    """Build the prompt of a row; `arguments` are variables of the chat template. Raises like `row_messages` and
    `row_arguments`."""
    chat = row_messages(row, system, tokenizer)
    tokens, begun = prompt_and_beginning(chat, tokenizer, row_arguments(row, arguments, tokenizer))
    return Prompt(
        uid=uid, messages=chat, tokens=tokens, begun=begun, answer=row.answer, metadata=row.metadata, chat=row.chat
    )


def tokens_in_common(tokens: Ints, other: Ints) -> int:
    """The length of the common prefix, rounded down to a multiple of PREFIX_STEP, and to the start of an image if it
    would end inside one."""
    length = min(len(tokens), len(other))
    same = tokens[:length] == other[:length]
    first_different = length if same.all() else int(same.argmin())
    common = first_different // PREFIX_STEP * PREFIX_STEP
    if common == len(tokens) or tokens[common] >= 0:
        return common

    return outside_image(tokens, common)


class Cursor:
    """Draws rows epoch after epoch, each row once per epoch; a checkpoint stores it as four values. The uid of a draw
    is epoch x size + position: unique in a run, and the same after a resume.

    Args:
        size: number of rows; >= 1.
        seed: with the number of the epoch, determines the epoch's order.
        shuffle: False keeps the order of the rows.
    """

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        require(size >= 1, "size", size, "must be >= 1: there is nothing to draw from")
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self.drawn = 0
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def next(self, n: int) -> range:
        """Make the next n draws and return their uids; they may cross the end of an epoch."""
        self.drawn += n
        return range(self.drawn - n, self.drawn)

    def row(self, uid: int) -> int:
        """Return the row, in 0 … size-1, of a past or future uid; does not move the cursor."""
        epoch, position = divmod(uid, self.size)
        if self.shuffle:
            return int(self._epoch_order(epoch)[position])
        return position

    def state(self) -> dict[str, Any]:
        """Return JSON values that `load` restores."""
        return {"size": self.size, "seed": self.seed, "shuffle": self.shuffle, "drawn": self.drawn}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`; FieldError, with both values, if size, seed or shuffling differ."""
        for name in ("size", "seed", "shuffle"):
            stored = state.get(name)
            expected = getattr(self, name)
            bound = f"in the checkpoint, but the run has {expected!r}; resume with the same data and seed"
            require(stored == expected, f"cursor.{name}", stored, bound)
        drawn = state.get("drawn")
        require(isinstance(drawn, int) and drawn >= 0, "cursor.drawn", drawn, "must be an integer >= 0")
        self.drawn = int(state["drawn"])

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, permutation(self.size, self.seed, epoch))
        return self._order[1]


class PromptSource:
    """Draws prompts in the cursor's order. A prompt that leaves no room for a new token is skipped or refused, never
    cut.

    Args:
        rows: the data of a task.
        tokenizer: the policy's.
        context: most tokens of prompt and completion together, >= 2; a prompt may have context - 1.
        cursor: the order; its uids become those of the prompts.
        system: system prompt for rows without one; None: off.
        template_arguments: variables that the chat template reads besides the messages.
        over_length: `skip` counts and skips a prompt that is too long, `refuse` raises.
        pool: decides which draws are asked; None: all.

    `skipped` counts the draws skipped so far; `longest` is the number of tokens of the longest prompt.
    """

    replays: ClassVar[bool] = False  # the groups of its prompts are generated, not read from another run

    def __init__(
        self,
        rows: Rows,
        tokenizer: Tokenizer,
        *,
        context: int,
        cursor: Cursor,
        system: str | None = None,
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
        over_length: Literal["skip", "refuse"] = "skip",
        pool: PooledQuestions | None = None,
    ) -> None:
        require(context >= 2, "context", context, "must be >= 2 tokens: one of prompt and one to generate")
        self.rows = rows
        self.tokenizer = tokenizer
        self.cursor = cursor
        self.context = context
        self.system = system
        self.over_length = over_length
        self.template_arguments = template_arguments
        self.images: ImageStore | None = image_store_of(tokenizer)
        self.pool = pool
        self.skipped = 0
        self.longest = 0

    def next(self, n: int) -> list[Prompt]:
        """Return the next n prompts; UserError if one is too long with `over_length: refuse`, or if as many prompts in
        a row as an epoch has don't fit."""
        prompts: list[Prompt] = []
        skipped_in_a_row = 0
        while len(prompts) < n:
            (uid,) = self.cursor.next(1)
            row = self.cursor.row(uid)
            weight = 1.0 if self.pool is None else self.pool.weight(row, uid)
            if weight is None:
                continue
            prompt = self.prompt(row, uid)
            if prompt is not None:
                if weight != 1:
                    prompt = replace(prompt, weight=weight)
                prompts.append(prompt)
                skipped_in_a_row = 0
                continue
            self.skipped += 1
            skipped_in_a_row += 1
            self._require_some_fit(skipped_in_a_row)
        if self.images is not None:
            self.images.write()
        return prompts

    def next_useful(self, groups: int, rate: float, most: int) -> list[Prompt]:
        """Return as many of the next prompts as are expected to have this many useful groups by the pool, at most
        `most`. Where it knows nothing of a question, `rate` of its groups are expected to be useful; raises as
        `next`."""
        pool = self.pool
        assert pool is not None
        prompts: list[Prompt] = []
        expected = 0.0
        while len(prompts) < most and expected < groups - ROUNDING:
            (prompt,) = self.next(1)
            prompts.append(prompt)
            expected += pool.expected(self.cursor.row(prompt.uid), rate)
        return prompts

    def prompts_for(self, uids: Sequence[int]) -> list[Prompt]:
        """Return again the prompts of uids that `next` has returned, with weight 1; does not move the cursor. UserError
        if one no longer fits."""
        prompts = [(uid, self.prompt(self.cursor.row(uid), uid)) for uid in uids]
        gone = [uid for uid, prompt in prompts if prompt is None]
        if gone:
            raise UserError(f"prompts {gone} no longer fit", remedy=self._limit())
        return [prompt for _, prompt in prompts if prompt is not None]

    def prompt(self, row: int, uid: int) -> Prompt | None:
        """Return the prompt of a row, or None if it is skipped; does not move the cursor."""
        prompt = self._build(row, uid)
        self.longest = max(self.longest, len(prompt.tokens))
        if len(prompt.tokens) < self.context:
            return replace(prompt, shared_prefix=self._shared_prefix(row, prompt.tokens))
        if self.over_length == "refuse":
            reason = f"refuses row {row}: its prompt has {len(prompt.tokens)} tokens"
            remedy = f"{self._limit()}, or set data.over_length=skip"
            raise FieldError("data.over_length", self.over_length, reason, remedy=remedy)
        return None

    def _shared_prefix(self, row: int, tokens: Ints) -> int:
        """Return `Prompt.shared_prefix`: the longest prefix shared with the prompts of a few fixed rows. It depends
        only on the data, so an engine splits a prompt in the same way whatever else it generates."""
        common = (tokens_in_common(tokens, other) for at, other in self._examples.items() if at != row)
        return max(common, default=0)

    @cached_property
    def _examples(self) -> dict[int, Ints]:
        """The prompt tokens of some rows from all parts of the data, because rows, and sources of a mix, may have their
        own system prompts."""
        examples: dict[int, Ints] = {}
        for row in {i * len(self.rows) // EXAMPLES for i in range(EXAMPLES)}:
            with suppress(UserError):  # raised where the row is used
                examples[row] = self._build(row, 0).tokens
        return examples

    def _build(self, row: int, uid: int) -> Prompt:
        try:
            return to_prompt(self.rows[row], uid, self.tokenizer, self.system, self.template_arguments)
        except UserError as error:
            if self.images is None:
                raise
            raise UserError(f"row {row}: {error.reason}", remedy=error.remedy) from None

    def count_over_length(self, limit: int = 0) -> int:
        """Count the rows among the first `limit` (0: all) that are too long; needs no weights. Raises like `next`."""
        if limit:
            count = min(limit, len(self.rows))
        else:
            count = len(self.rows)
        too_long = sum(self.prompt(row, uid=row) is None for row in range(count))
        self._require_some_fit(too_long)
        return too_long

    def state(self) -> dict[str, Any]:
        """Return JSON values that `load` restores."""
        state = {"cursor": self.cursor.state(), "skipped": self.skipped}
        if self.pool is None:
            return state
        return {**state, "pool": self.pool.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`; raises like `Cursor.load`."""
        self.cursor.load(state["cursor"])
        self.skipped = int(state["skipped"])
        if self.pool is not None:
            self.pool.load(state.get("pool", {}))

    def judged(self, judgements: Mapping[int, Judgement]) -> None:
        """Tell the pool, if there is one, what the groups were, by uid."""
        if self.pool is not None:
            for uid, judgement in judgements.items():
                self.pool.judged(self.cursor.row(uid), judgement)

    def _require_some_fit(self, too_long: int) -> None:
        if too_long >= len(self.rows):
            raise UserError(f"data: none of the {too_long} prompts fits", remedy=self._limit())

    def _limit(self) -> str:
        holds = f"the model holds {self.context} tokens and one must be left to generate"
        return f"{holds}: shorten the rows or raise model.max_length"
