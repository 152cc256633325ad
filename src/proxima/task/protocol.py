"""What a task is: a numbered list of rows, each with messages and an answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxima.data import Message


@dataclass(frozen=True, kw_only=True)
class Row:
    """A question before the tokenizer: what a prompt is made of."""

    messages: tuple[Message, ...]
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Rows(Protocol):
    """A finite, random-access, deterministic dataset: `rows[i]` is the same row in every process."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


class Task(Protocol):
    """A frozen dataclass whose fields are its config."""

    def rows(self, seed: int) -> Rows:
        """Open the data. `seed` makes generated tasks; it does not order the rows (`task.cursor` does).

        Raises:
            ValueError: a missing file, an absent column, an empty dataset: one line that names it and the remedy.
        """
        ...
