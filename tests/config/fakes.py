"""Specs from outside the house, as somebody else would write them."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from proxima.core.loss import Surrogate
from proxima.data import require
from proxima.engine.protocol import EngineSpec
from proxima.task.protocol import Row


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Questions about sums. With a second sentence.

    Args:
        low, high: bounds of the numbers,
            inclusive.
        path: a data file; none: generated.
    """

    low: int = 0
    high: int = 9
    path: str | None = None
    split: Annotated[Literal["train", "test"], "which half of the questions"] = "train"

    def rows(self, seed: int) -> list[Row]:
        return [
            Row(messages=({"role": "user", "content": f"What is {i} + 1?"},), answer=i + 1)
            for i in range(self.low, self.high)
        ]


@dataclass(frozen=True, kw_only=True)
class PlayedSums(Sums):
    """A task that is played unless a recipe says otherwise."""

    environment: str | None = "calculator"
    tools: tuple[str, ...] = ()


@dataclass(frozen=True)
class Everything:
    """A field of each type.

    Args:
        flag: a switch.
        count: how many.
        ratio: how much.
        name: a text.
        choice: one of two, or nothing.
        pair: two things.
        many: numbers.
        table: names to numbers.
        either: a number or a word.
        anything: whatever.
    """

    flag: bool = False
    count: int = 1
    ratio: float = 0.5
    name: str = "x"
    choice: Literal["a", "b", 3] | None = None
    pair: tuple[int, str] = (1, "a")
    many: tuple[float, ...] = ()
    table: dict[str, int] = field(default_factory=dict)
    either: float | str = 1.0
    anything: Any = None
    kind_of_thing: ClassVar[str] = "not a field"

    def __post_init__(self) -> None:
        require(self.count > 0, "count", self.count, "must be > 0")
        if self.name == "bad":
            raise ValueError("the name is bad; take another")


@dataclass(frozen=True)
class NeedsReference(Surrogate):
    """Wants the reference policy."""

    needs: ClassVar[frozenset[str]] = frozenset({"reference_log_prob"})


@dataclass(frozen=True)
class Unversioned(EngineSpec):
    """An engine that says nothing about versions."""

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"behavior_log_prob"})

    def build(self, setup: Any) -> Any:
        raise NotImplementedError


def not_a_class() -> None: ...
