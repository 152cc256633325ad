"""The rows of environments that have their own data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from proxima.data import FieldError, require, within
from proxima.environment import ENVIRONMENTS
from proxima.environment.agent_kinds import agent_class, asked_kind, is_concurrent, make_agent
from proxima.environment.interface import require_environment
from proxima.system.user_modules import user_class
from proxima.task.protocol import MappedRows, PlayedTask, Row, Rows


@dataclass(frozen=True, kw_only=True)
class EnvironmentRows(PlayedTask):
    """The rows of the task's environment, of a kind that has its own data.

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
        if isinstance(self.environment, Mapping):
            kind = self.environment.get("kind")
        else:
            kind = self.environment
        if not isinstance(kind, str) or ":" not in kind:  # a class of the user's is imported when its rows are read
            require(isinstance(kind, str), "environment", kind, "has no rows of its own", remedy="name another task")
            require_environment(str(kind))
            _require_rows(kind, _asked_class(kind))

    def rows(self, seed: int) -> Rows:
        """Return the environment's rows; the seed has no effect."""
        arguments: dict[str, Any] = {}
        if isinstance(self.environment, Mapping):
            arguments = dict(self.environment)
            kind = arguments.pop("kind")
        else:
            kind = self.environment
        own = user_class(kind) if ":" in kind else None
        _require_rows(kind, own or _asked_class(kind))
        with within("environment"):
            if own is None:
                environment = asked_kind(kind, arguments)
            else:
                environment = make_agent(own, arguments, kind)
        try:
            items = environment.rows(self.split, self.skip, self.size)
        except FieldError as error:
            if error.field not in ("split", "size"):
                error.field = f"environment.{error.field}"
            raise
        if self.skip:
            require(bool(items), "skip", self.skip, "leaves no row")
        else:
            require(bool(items), "split", self.split, "leaves no row")
        return MappedRows(items, _row)


def _asked_class(kind: object) -> type | None:
    """The class of a kind that can be asked for rows."""
    cls = agent_class(kind)
    if cls is None and is_concurrent(kind):
        return ENVIRONMENTS[str(kind)]
    return cls


def _require_rows(kind: object, cls: type | None) -> None:
    """Raise FieldError unless a kind has rows of its own; the remedy names those that have."""
    with_rows = [name for name in ENVIRONMENTS if hasattr(_asked_class(name), "rows")]
    if with_rows:
        named = f"name one of {', '.join(with_rows)}, or another task"
    else:
        named = "name another task"
    remedy = "; ".join(filter(None, [named, ENVIRONMENTS.elsewhere]))
    asked = getattr(cls, "plays", False) is True or is_concurrent(kind)  # else `rows` is a tool
    require(asked and hasattr(cls, "rows"), "environment", kind, "has no rows of its own", remedy=remedy)


def _row(number: int, item: Mapping[str, Any]) -> Row:
    messages = tuple(item["messages"]) or ({"role": "user", "content": ""},)  # an environment may open the chat later
    columns = {name: value for name, value in item.items() if name not in ("messages", "answer")}
    return Row(messages=messages, answer=item["answer"], metadata=columns, chat=True)
