"""A peer's options during conversion: which a converter read, and how the others are listed."""

import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxima.config.problems import ConfigError, one_problem
from proxima.peers.convert.read import UNREADABLE


@dataclass(frozen=True)
class Ignored:
    """Options that change nothing here: `fnmatch` patterns over dotted names, and why."""

    why: str
    patterns: tuple[str, ...]


@dataclass(frozen=True)
class Unsupported:
    """Options that would change the result and have no equivalent yet; harmless while their value is one of `off`."""

    why: str
    patterns: tuple[str, ...]
    off: tuple[Any, ...] = (None, False, 0, "", "none", "disabled")


Rule = Ignored | Unsupported


@dataclass
class Options:
    """The options of one file.

    Args:
        peer: its name as in texts, `verl`.
        flat: dotted name → value.
        file: what errors call the file.
        asked: names that a converter read; filled by the methods below.
    """

    peer: str
    flat: Mapping[str, Any]
    file: str
    asked: set[str] = field(default_factory=set)

    def given(self, *names: str) -> bool:
        """Whether the file sets one of the names to something other than null. Marks them as read."""
        self.asked.update(names)
        return any(self.flat.get(name) is not None for name in names)

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first name that is set; later names are the spellings of other versions."""
        self.asked.update(names)
        for name in names:
            if self.flat.get(name) is not None:
                return self.readable(name)
        return default

    def number(
        self, *names: str, default: float | None = None, least: float | None = None, most: float | None = None
    ) -> Any:
        """As `get`, for a number in [`least`, `most`]; an int stays an int."""
        value = self.get(*names, default=default)
        if value is None:
            return None
        if isinstance(value, str):
            value = _parsed(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise self.refused("must be a number; write it out in the file", *names)
        if (least is not None and value < least) or (most is not None and value > most):
            bounds = f">= {least:g}" if most is None else f"in [{least:g}, {most:g}]"
            raise self.refused(f"must be {bounds}", *names)
        return value

    def sourced(self, *names: str, default: float | None = None) -> tuple[Any, str]:
        """The number with its origin."""
        return self.number(*names, default=default), self.origin(*names)

    def whole(self, *names: str, default: int | None = None, least: int | None = None) -> Any:
        """As `number`, for a whole number."""
        value = self.number(*names, default=default, least=least)
        if value is None or isinstance(value, int):
            return value
        if not math.isfinite(value) or value != int(value):
            raise self.refused("must be a whole number", *names)
        return int(value)

    def refused(self, message: str, *names: str) -> ConfigError:
        """The error for a value that is invalid."""
        name = next((name for name in names if self.flat.get(name) is not None), names[0])
        return one_problem(name, message, str(self.flat.get(name)), self.file)

    def flag(self, *names: str, default: bool = False) -> bool:
        """As `get`, for true or false, which scripts also write as strings."""
        value = self.get(*names, default=default)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise self.refused("must be true or false; write it out in the file", *names)
        return value

    def readable(self, name: str) -> Any:
        """The value. Raises ConfigError when only a run of the peer would know it."""
        value = self.flat[name]
        if value is UNREADABLE or (isinstance(value, str) and "$" in value):
            shown = "an expression" if value is UNREADABLE else value
            raise one_problem(
                name, "can't be known without running it; write the value itself into the file", shown, self.file
            )
        return value

    def origin(self, *names: str) -> str:
        """Where a value came from, as a comment: the option that is set, or the peer's default."""
        for name in names:
            if self.flat.get(name) is not None:
                return f"from {name}"
        return f"{self.peer}'s default of {names[0]}"

    def left(self) -> list[str]:
        """Names in the file that no converter read."""
        return [name for name in self.flat if name not in self.asked]


def _parsed(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True)
class Leftover:
    """An option without an equivalent, and why."""

    name: str
    why: str


def sort_out(o: Options, rules: Sequence[Rule]) -> tuple[list[Leftover], list[Leftover], list[Leftover]]:
    """The options that no converter read: ignored (no effect here), unsupported, unknown."""
    ignored: list[Leftover] = []
    unsupported: list[Leftover] = []
    unknown: list[Leftover] = []
    for name in o.left():
        rule = next(
            (rule for rule in rules if any(fnmatch.fnmatchcase(name, pattern) for pattern in rule.patterns)), None
        )
        if rule is None:
            unknown.append(Leftover(name, _nearest(name, o, rules)))
        elif isinstance(rule, Ignored):
            ignored.append(Leftover(name, rule.why))
        elif any(o.flat[name] is off or (o.flat[name] == off and type(o.flat[name]) is type(off)) for off in rule.off):
            ignored.append(Leftover(name, "off, or neutral"))
        else:
            unsupported.append(Leftover(name, rule.why))
    return ignored, unsupported, unknown


def _nearest(name: str, o: Options, rules: Sequence[Rule]) -> str:
    """The option probably meant: a similar name in the same section, or the same name in another section."""
    known = o.asked | {pattern for rule in rules for pattern in rule.patterns if "*" not in pattern}
    section, _, last = name.rpartition(".")
    beside = {other.rpartition(".")[2]: other for other in sorted(known) if other.rpartition(".")[0] == section}
    near = difflib.get_close_matches(last, beside, n=1, cutoff=0.7)
    elsewhere = sorted(other for other in known if other.rpartition(".")[2] == last)
    found = [beside[one] for one in near] or elsewhere
    return f"did you mean {found[0]!r}?" if found else f"{o.peer} has no such option that we know"
