"""The protocol of tasks: numbered lists of rows, each with messages and an answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from proxima.data import FieldError
from proxima.data.flow import Message


@dataclass(frozen=True, kw_only=True)
class Row:
    """A question before tokenization, from which a prompt is built.

    Args:
        messages: the chat. chat: the data has it as messages, not as a text.
        answer: the reference answer, any JSON value. metadata: further columns, JSON values.
        images: as `task.image_files.open_image` takes them; `<image>` in the messages marks where each is shown.
        arguments: the row's own variables of the chat template, such as `tools`.
        fills_nulls: objects in `metadata` also have the keys of other rows, with null.
    """

    messages: tuple[Message, ...]
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = False
    images: tuple[Any, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fills_nulls: bool = False


class EmptyPromptError(FieldError):
    """A row has no prompt; `field` names the empty part. Training on a fixed data set may skip the row."""


def user_message(content: str) -> tuple[Message, ...]:
    """Return a chat of one user message."""
    return ({"role": "user", "content": content},)


class Rows(Protocol):
    """A finite, random-access, deterministic dataset: `rows[i]` is the same row in every process."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


@dataclass(frozen=True)
class MappedRows:
    """Rows built on access.

    Args:
        items: the source items of the rows, by number.
        row: builds the row from a number and its item.
        unusable: the errors of the rows known to have no prompt, in order.
        place: returns where the row of an item was read, as file:line; None: unknown.
        about: what they are of, for people: the part of a data set, or the shares of a mix; empty: all rows of a task.
        left_out: the rows that are held out from these, of one task or of the sources of a mix.
        notes: warnings about them.
        sources: the number of the source of each row of a mix, without those of mixes within it; None: no mix.
    """

    items: Any
    row: Callable[[int, Any], Row]
    unusable: tuple[EmptyPromptError, ...] = ()
    place: Callable[[Any], str] | None = None
    about: str = ""
    left_out: "tuple[Rows, ...]" = ()
    notes: tuple[str, ...] = ()
    sources: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.row(index, self.items[index])


def unusable_rows(rows: Rows) -> tuple[EmptyPromptError, ...]:
    """The errors of the rows known to have no prompt; none for rows of a user's own class."""
    return rows.unusable if isinstance(rows, MappedRows) else ()


def row_sources(rows: Rows) -> NDArray[np.int64] | None:
    """The number of the source of each row, see `MappedRows.sources`; None for rows of a user's own class."""
    return rows.sources if isinstance(rows, MappedRows) else None


def row_place(rows: Rows, number: int) -> str:
    """`pairs.jsonl:4`, or `row 3` where the rows are not lines of a file."""
    if isinstance(rows, MappedRows) and rows.place is not None:
        return rows.place(rows.items[number])
    return f"row {number}"


def about_rows(rows: Rows) -> str:
    """What the rows are of, see `MappedRows.about`; empty for rows of a user's own class."""
    return rows.about if isinstance(rows, MappedRows) else ""


class Task(Protocol):
    """A frozen dataclass whose fields are its config; in-tree tasks also have the fields of `PlayedTask`."""

    def rows(self, seed: int) -> Rows:
        """Open the data. `seed` is for generated tasks; it does not order the rows (`task.prompts.Cursor` does).

        Raises:
            UserError: a file or column is missing, or there are no rows; names it and the remedy.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PlayedTask:
    """Base of the kinds of tasks: the environment and the tools with which the model answers their prompts.

    Args:
        environment: a kind of environment, `package.module:Class`, or `{kind: …}` with its arguments; null: the
            model answers once.
        tools: functions that the model may call, each `package.module:function`.
    """

    environment: str | Mapping[str, Any] | None = None
    tools: tuple[str, ...] = ()

    def prepare(self) -> None:
        """Create what the episodes need, such as container images; called before weights are loaded.

        Raises:
            UserError: it can't be created.
        """


def play_of(task: Any) -> PlayedTask:
    """The environment and tools of a task; a user's own class may lack these fields."""
    return PlayedTask(environment=getattr(task, "environment", None), tools=tuple(getattr(task, "tools", None) or ()))


def is_played(task: Any) -> bool:
    """Return True if a task has episodes: an environment or tools."""
    play = play_of(task)
    return bool(play.environment or play.tools)
