"""A recipe under construction: each value with the option it came from, and the YAML text with both."""

import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from proxima.config.resolved import Lines, nested, yaml_lines
from proxima.config.scalars import for_any_reader
from proxima.config.tree import FILL_IN, is_index
from proxima_peers.convert.options import Leftover, Options, Sourced, on_one_line

# The order of the fields in a recipe.
ALGORITHM = (
    "proximal",
    "behavior",
    "advantage",
    "surrogate",
    "correction",
    "aggregate",
    "selection",
    "dynamic_sampling",
    "reference_kl",
    "penalty",
    "reward_kl",
    "entropy_bonus",
)
SECTIONS = (
    "model",
    "placement",
    "task",
    "data",
    "sft",
    "reward_model",
    "preference",
    "reward",
    "algorithm",
    "critic",
    "engine",
    "sampling",
    "episode",
    "train",
    "eval",
    "checkpoint",
    "runtime",
    "seed",
    "monitor",
)
WIDTH = 130
TITLES = {  # of the lists of a draft
    "missing": "to fill in, the file does not say",
    "assumed": "defaults of the framework, assumed because the file does not set them",
    "unsupported": "not supported yet",
    "unknown": "unknown option",
    "read": "read, and said by the fields together",
    "ignored": "ignored, no effect here",
}

Fields = dict[str, Sourced]
EMPTY: dict[str, Any] = {  # the values of slots that a recipe may leave out, put where a slot waits for the user
    "eval.task": None,
    "algorithm.selection": [],
    "algorithm.distillation": None,
    "monitor": [],
    "engine": "local",
    "task.environment": None,
    "task.tools": [],
}


@dataclass(frozen=True)
class Entry:
    """A leaf of the recipe: its value, the comment after it, and a note on the lines above it.

    Args:
        stands_in: the file names no such part (a task, a reward, a model), and `value` is none that a run may use: the
            recipe has the origin in its place, which begins with `FILL_IN` and is refused.
    """

    value: Any
    origin: str
    note: str = ""
    stands_in: bool = False

    @property
    def written(self) -> Any:
        """The value in the recipe."""
        return self.origin if self.stands_in else self.value


@dataclass
class Draft:
    """Values by dotted path of our schema, an index for entries of lists: `algorithm.correction.0.kind`.

    Args:
        waiting: path of an entry → the options that it waits for.
        defaults: what the peer's defaults mean here where no field has their value, for `assumed`.
        own_columns: a function named in the file scores rows by their columns, so GSM8K's files are read as files.
        missing, unsupported, unknown, ignored: values that the file does not give; options without an equivalent.
        assumed: the peer's defaults that values come from, with the version.
        read: options that influenced fields, but are not named as the origin of any.
        problems: the reasons why the recipe would not resolve or run here; empty if it would.
        head: the first lines of the text.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    unsupported: list[Leftover] = field(default_factory=list)
    ignored: list[Leftover] = field(default_factory=list)
    unknown: list[Leftover] = field(default_factory=list)
    missing: list[Leftover] = field(default_factory=list)
    assumed: list[Leftover] = field(default_factory=list, init=False)
    read: list[Leftover] = field(default_factory=list)
    waiting: dict[str, list[str]] = field(default_factory=dict)
    own_columns: bool = False
    defaults: list[str] = field(default_factory=list, init=False)
    problems: tuple[str, ...] = field(default=(), init=False)
    head: str = field(default="", init=False)

    def put(self, path: str, value: Any, origin: str, note: str = "") -> None:
        """Set a leaf. `origin`: the source of the value. `note`: its meaning in the peer, if not the same."""
        self.entries[path] = Entry(value, origin, note)
        if origin.startswith(FILL_IN):
            self.missing.append(Leftover(path, origin.removeprefix(f"{FILL_IN}: ")))

    def spec(self, path: str, kind: str, origin: str, note: str = "", /, **fields: tuple[Any, str]) -> None:
        """Set a slot: its kind, and its fields as (value, origin)."""
        self.put(f"{path}.kind", kind, origin, note)
        for name, (value, source) in fields.items():
            self.put(f"{path}.{name}", value, source)

    def flag(self, path: str, o: Options, name: str) -> None:
        """Set a leaf to a boolean option, if the file sets it."""
        if o.given(name):
            self.put(path, o.flag(name), o.origin(name))

    def copy(
        self, path: str, o: Options, *names: str, default: Any = None, whole: bool = False, note: str = ""
    ) -> None:
        """Set a leaf to an option's number, or to `default`; no effect without either."""
        if whole:
            value = o.whole(*names, default=default)
        else:
            value = o.number(*names, default=default)
        if value is not None:
            self.put(path, value, o.origin(*names), note)

    def append(self, path: str, kind: str, origin: str, note: str = "", /, **fields: tuple[Any, str]) -> None:
        """Add a spec to a list slot."""
        index = len({name[len(path) + 1 :].split(".")[0] for name in self.entries if name.startswith(f"{path}.")})
        self.spec(f"{path}.{index}", kind, origin, note, **fields)

    def lacks(self, name: str, why: str) -> None:
        """Record an option that changes results and has no equivalent yet."""
        self.unsupported.append(Leftover(name, why))

    def needs(self, path: str, why: str) -> None:
        """Record a value to fill in, with our default as a placeholder."""
        self.missing.append(Leftover(path, on_one_line(why)))

    def wait(self, path: str, option: str, why: str) -> None:
        """Mark the value at `path`, or the kind or first value below it, as one that the user has to confirm or change.

        For code and data that an option names but no field can represent; the recipe is refused until then.
        """
        at = self._place(path)
        if at is None and path in EMPTY:
            at = path
            self.entries[path] = Entry(EMPTY[path], "our default")
        if at is None:
            at = "model.path"
        waiting = self.waiting.setdefault(at, [])
        waiting.append(option)
        if len(waiting) == 1:
            reason = f"{option}: {why}"
        else:
            reason = f"{', '.join(waiting)}: the reasons are at the top"
        entry = self.entries[at]
        stands_in = entry.stands_in or (path == "reward" and entry.value == "gsm8k")  # chosen by the data alone
        self.entries[at] = replace(entry, origin=on_one_line(f"{FILL_IN}: {reason}"), stands_in=stands_in)
        self.missing.append(Leftover(option, on_one_line(f"{why} (at {at})")))

    def _place(self, path: str) -> str | None:
        """The entry of a slot: the leaf itself, else its kind, else the first value below it."""
        for name in (path, f"{path}.kind", f"{path}.0.kind"):
            if name in self.entries:
                return name
        for name in self.entries:
            if name.startswith(f"{path}."):
                return name
        return None

    def doubt(self, o: Options) -> None:
        """Record the values that could not be used and that no entry names."""
        named = " ".join(f"{leftover.name} {leftover.why}" for leftover in (*self.missing, *self.unsupported))
        for name, why in o.doubts.items():
            if name not in named:
                self.needs(name, why)

    def account(self, o: Options) -> None:
        """Record the options that were read but that neither an entry nor a list names, so that none is lost."""
        texts = [f"{entry.origin} {entry.note}" for entry in self.entries.values()]
        for _, leftovers in self.leftovers():
            texts += [f"{leftover.name} {leftover.why}" for leftover in leftovers]
        words = re.findall(r"[^\s()'=]+", " ".join(texts))
        named = {word.strip(".,:;") for word in words}
        for name, value in o.flat.items():
            if name in o.asked and name not in named:
                written = "null" if value is None else str(value)
                self.read.append(Leftover(name, on_one_line(written)[:60]))

    def assume(self, peer: str, version: str) -> None:
        """Record each default of the peer that a value comes from, with the version whose default it is."""
        for path, entry in self.entries.items():
            if entry.origin.startswith(FILL_IN):
                continue
            option = entry.origin.partition(f"{peer}'s default of ")[2]
            name, _, of_version = option.partition(", in ")
            name = re.split("[,:]", name)[0]
            place = f"{path}={for_any_reader(entry.value)}"
            if name:
                place += f" ({name})"
            if name or f"{peer}'s default" in entry.origin:
                self.assumed.append(Leftover(place, f"{peer} {of_version or version}"))
        for line in self.defaults:
            self.assumed.append(Leftover(line, f"{peer} {version}"))

    def default(self, o: Options, name: str, value: Any, meaning: str) -> None:
        """Record a default of the peer that no field has: what it means here. No effect if the file sets the option."""
        if not o.given(name):
            self.defaults.append(f"{name}={for_any_reader(value)} ({meaning})")

    def drops(self, name: str, why: str) -> None:
        """Record an option that has no effect here."""
        self.ignored.append(Leftover(name, why))

    def drops_given(self, o: Options, why: str, *names: str) -> None:
        """Record those of the options that the file sets as having no effect here."""
        for name in names:
            if o.given(name):
                self.drops(name, why)

    def ask(self, path: str, value: Any, what: str, kind: bool = False) -> None:
        """Put a placeholder where a recipe needs a value that the file does not give: `FILL_IN` with the reason for a
        task, a reward or a model, which no other can stand for; for other values our default, with that comment."""
        place = f"{path}.kind" if kind else path
        stands_in = value is not None and (path.startswith(("task", "reward", "eval.task")) or path.endswith(".path"))
        self.entries[place] = Entry(value, on_one_line(f"{FILL_IN}: {what}"), stands_in=stands_in)
        self.missing.append(Leftover(path, on_one_line(what)))

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe as it is written, as plain dicts and lists."""
        return {key: _plain(value, lambda entry: entry.written) for key, value in self._nested().items()}

    @property
    def filled(self) -> dict[str, Any]:
        """The recipe with a stand-in for each part that is to be filled in, so that the rest of it can be resolved."""
        return {key: _plain(value, lambda entry: entry.value) for key, value in self._nested().items()}

    def _nested(self) -> dict[str, Any]:
        root = nested(self.entries.items())
        if "algorithm" in root:
            root["algorithm"] = _ordered(root["algorithm"], ALGORITHM)
        return _ordered(root, SECTIONS)

    @property
    def text(self) -> str:
        """The recipe as YAML: `head` and the leftovers as comments, each value with its origin."""
        lines = [f"# {line}".rstrip() for line in self.head.splitlines()]
        for title, leftovers in self.leftovers():
            lines += ["#", f"# {title}:", *(f"# {line}" for line in _grouped(leftovers))]
        lines.append("")
        for key, value in self._nested().items():
            for line, origin in yaml_lines({key: value}, _leaf):
                if origin is not None:
                    line += f"  # {origin}"
                lines.append(line)
            if isinstance(value, dict):
                lines.append("")
        return "\n".join(lines).rstrip() + "\n"

    def leftovers(self) -> list[tuple[str, list[Leftover]]]:
        """The lists that are not empty, with their titles."""
        titled = [(title, getattr(self, name)) for name, title in TITLES.items()]
        return [(title, leftovers) for title, leftovers in titled if leftovers]

    @property
    def report(self) -> list[str]:
        """The leftovers for a terminal."""
        lines = []
        for title, leftovers in self.leftovers():
            lines += [f"{title}:", *_grouped(leftovers)]
        return lines


def _grouped(leftovers: list[Leftover]) -> Iterator[str]:
    """`  why: name, name`, one or more lines per reason."""
    by_reason: dict[str, list[str]] = {}
    for leftover in leftovers:
        by_reason.setdefault(leftover.why, []).append(leftover.name)
    for why, names in by_reason.items():
        if len(names) < 4:
            text = f"{', '.join(names)}: {why}"
        else:
            text = f"{why}: {', '.join(names)}"
        yield from textwrap.wrap(
            text, WIDTH, initial_indent="  ", subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
        )


def _ordered(fields: dict[str, Any], order: tuple[str, ...]) -> dict[str, Any]:
    def place(name: str) -> int:
        return order.index(name) if name in order else len(order)

    return {name: fields[name] for name in sorted(fields, key=place)}


def _plain(value: Any, of: Callable[[Entry], Any]) -> Any:
    if isinstance(value, Entry):
        return of(value)
    if value and all(map(is_index, value)):
        return [_plain(value[key], of) for key in sorted(value, key=int)]
    return {key: _plain(child, of) for key, child in value.items()}


def _leaf(key: str, entry: Entry, margin: str) -> Lines:
    origin = None if entry.stands_in else entry.origin
    notes: Lines = [(f"{margin}# {line}", None) for line in textwrap.wrap(entry.note, WIDTH - len(margin))]
    return [*notes, (f"{margin}{key}: {for_any_reader(entry.written)}", origin)]
