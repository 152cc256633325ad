"""Prompts that the environment writes."""

from dataclasses import dataclass

from proxima.data import require
from proxima.task.protocol import MappedRows, PlayedTask, Row, Rows, user_message


@dataclass(frozen=True, kw_only=True)
class Seeds(PlayedTask):
    """Rows with nothing but a number, for an environment whose `reset` writes the prompt from its seed.

    Args:
        count: number of rows; >= 1.
    Returns: rows whose message is empty, and whose metadata has `number`, from 0.
    """

    count: int = 1000

    def __post_init__(self) -> None:
        require(self.count >= 1, "count", self.count, "must be >= 1")
        remedy = "name an environment that writes the prompt in `reset`, or another task"
        require(self.environment is not None, "environment", None, "must be set: the rows have no text", remedy=remedy)

    def rows(self, seed: int) -> Rows:
        """Return the numbered rows; each draw of a row has its own seed, in every epoch."""
        return MappedRows(
            range(self.count), lambda number, _: Row(messages=user_message(""), metadata={"number": number})
        )
