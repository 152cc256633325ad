"""The rows of environments that have their own data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from proxima.data import FieldError, require
from proxima.process.foreign_environment import FOREIGN, OWN_ROW, ForeignEnvironment, Unusable
from proxima.task.protocol import MappedRows, PlayedTask, Row, Rows


@dataclass(frozen=True, kw_only=True)
class EnvironmentRows(PlayedTask):
    """The rows of the task's environment, of a kind with its own data, such as `verifiers`.

    Args:
        split: `train`, or `eval`: the environment's evaluation data.
        skip: number of rows to leave out at the beginning.
        size: number of rows; null: all.
    Returns: rows with the environment's first messages and its answer; the metadata contains the environment's own row.
    Raises: FieldError if the environment has no data, or can't be loaded.
    """

    split: Literal["train", "eval"] = "train"
    skip: int = 0
    size: int | None = None

    def __post_init__(self) -> None:
        require(self.split in ("train", "eval"), "split", self.split, "must be 'train' or 'eval'")
        require(self.skip >= 0, "skip", self.skip, "must be >= 0")
        require(self.size is None or self.size >= 1, "size", self.size, "must be >= 1")
        kind = self.environment.get("kind") if isinstance(self.environment, Mapping) else self.environment
        remedy = f"name one of {', '.join(FOREIGN)}, or another task"
        require(kind in FOREIGN, "environment", kind, "has no rows of its own", remedy=remedy)

    def rows(self, seed: int) -> Rows:
        """Return the environment's rows; the seed has no effect."""
        given = self.environment if isinstance(self.environment, Mapping) else {"kind": self.environment}
        try:
            items = ForeignEnvironment.of(given).rows(self.split, self.skip, self.size)
        except Unusable as error:
            field = error.field if error.field in ("split", "size") else f"environment.{error.field}"
            raise FieldError(field, error.value, error.message) from None
        message = "leaves no row"
        require(bool(items), "skip" if self.skip else "split", self.skip or self.split, message)
        return MappedRows(items, _row)


def _row(number: int, item: Mapping[str, Any]) -> Row:
    messages = tuple(item["messages"]) or ({"role": "user", "content": ""},)  # an environment may open the chat later
    return Row(messages=messages, answer=item["answer"], metadata={OWN_ROW: item[OWN_ROW]}, chat=True)
