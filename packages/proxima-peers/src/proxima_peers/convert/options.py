"""A peer's options during conversion: the options that a converter read, and the values that it could not use."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from proxima.config.tree import FILL_IN
from proxima_peers.convert.read_python import UNREADABLE
from proxima_peers.convert.read_script import Doubtful

Names = Mapping[str, tuple[str, ...]]  # our field → options, of which the first that is set counts
Sourced = tuple[Any, str]  # a value with its origin


@dataclass(frozen=True)
class Leftover:
    """An option without an equivalent, and the reason."""

    name: str
    why: str


@dataclass
class Options:
    """The options of one file.

    A value that can't be used (an expression, a text where a number is needed, a name that the peer does not have) does
    not stop the conversion: the reason is recorded in `doubts`, the default replaces it, and `origin` says so.

    Args:
        peer: its name in texts, such as `verl`.
        flat: dotted name → value.
        file: the name of the file in errors.
        asked: names that a converter read; filled by the methods below.
        doubts: name → the reason why its value can't be used.
    """

    peer: str
    flat: Mapping[str, Any]
    file: str
    asked: set[str] = field(default_factory=set)
    doubts: dict[str, str] = field(default_factory=dict)

    def given(self, *names: str) -> bool:
        """Return True if the file sets one of the names to something other than null. Marks them as read."""
        self.asked.update(names)
        return any(self.flat.get(name) is not None for name in names)

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first name that is set and readable; later names are the spellings of other versions."""
        self.asked.update(names)
        for name in names:
            value = self.flat.get(name)
            if isinstance(value, Doubtful):
                self.doubts[name] = value.why
            elif value is UNREADABLE or (isinstance(value, str) and "${" in value):
                shown = "an expression" if value is UNREADABLE else value
                self.doubts[name] = f"the file has {shown}, known only to a run of the peer"
            elif value is not None and name not in self.doubts:
                return value
        return default

    def number(
        self, *names: str, default: float | None = None, least: float | None = None, most: float | None = None
    ) -> Any:
        """As `get`, for a number in [`least`, `most`]; an int stays an int."""
        value = self.get(*names, default=default)
        if isinstance(value, str):
            value = _parsed(value)
        if value is None or value == default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            return self.refuse("must be a number", *names, default=default)
        if (least is not None and value < least) or (most is not None and value > most):
            if most is None:
                bounds = f">= {least:g}"
            else:
                bounds = f"in [{least:g}, {most:g}]"
            return self.refuse(f"must be {bounds}", *names, default=default)
        return value

    def sourced(self, *names: str, default: float | None = None) -> Sourced:
        """The number with its origin."""
        return self.number(*names, default=default), self.origin(*names)

    def whole(self, *names: str, default: int | None = None, least: int | None = None) -> Any:
        """As `number`, for a whole number."""
        value = self.number(*names, default=default, least=least)
        if value is None or isinstance(value, int):
            return value
        if not math.isfinite(value) or value != int(value):
            return self.refuse("must be a whole number", *names, default=default)
        return int(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        """As `get`, for true or false, which scripts also write as strings."""
        value = self.get(*names, default=default)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            return bool(self.refuse("must be true or false", *names, default=default))
        return value

    def choice(self, choices: Iterable[str], *names: str, default: str) -> str:
        """As `get`, for one of `choices`."""
        value = str(self.get(*names, default=default))
        if value in choices:
            return value
        return str(self.refuse(f"known are {', '.join(choices)}", *names, default=default))

    def refuse(self, why: str, *names: str, default: Any = None) -> Any:
        """Record in `doubts` why the value of the first name that is set can't be used; return the default."""
        name = next((name for name in names if self.flat.get(name) is not None and name not in self.doubts), names[0])
        self.doubts[name] = f"the file has {self.flat.get(name)}; {why}"
        return default

    def origin(self, *names: str) -> str:
        """The source of a value, as a comment: the option that is set, or the peer's default."""
        for name in names:
            if name in self.doubts:
                stand_in = next((o for o in names if self.flat.get(o) is not None and o not in self.doubts), None)
                if stand_in:
                    standing = f"from {stand_in}"
                else:
                    standing = "the peer's default stands here"
                return on_one_line(f"{FILL_IN}: {name}: {self.doubts[name]}; {standing}")
            if self.flat.get(name) is not None:
                return f"from {name}"
        return f"{self.peer}'s default of {names[0]}"

    def left(self) -> list[str]:
        """The names in the file that no converter has read."""
        return [name for name in self.flat if name not in self.asked]


def on_one_line(text: str) -> str:
    """The text for a one-line comment: printable and cut to 300 characters."""
    letters = [letter if letter.isprintable() else " " for letter in text]
    return "".join(letters)[:300]


def _parsed(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
