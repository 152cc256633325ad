"""Converts another framework's options to a recipe: each value with its origin, options without an equivalent listed.

    read.py      file → options by dotted name       options.py   which options a converter read, and the others
    verl*.py, trl*.py, areal*.py, unirl.py           up to three files a peer: `convert(options) -> Draft`
    rules.py     options without an equivalent, and whether that matters       common.py   conversions that peers share
    draft.py     the recipe under construction, and its text
Where a peer means something else by a number, the number is converted and a note says so; no code of the peer is
imported or executed.
Imports: pyyaml, `proxima.config` and the tables it names. Imported by `cli`.
To add a peer: a file with `convert`, a line in `PEERS` and in `RULES`, an example in `tests/peers/examples`, rows in
`docs/migration.md`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxima.config import ConfigError, check, resolve
from proxima.peers.convert import areal, trl, unirl, verl
from proxima.peers.convert.draft import Draft
from proxima.peers.convert.options import Leftover, Options, sort_out
from proxima.peers.convert.read import read
from proxima.peers.convert.rules import RULES

PEERS: dict[str, tuple[str, Callable[[Options], Draft]]] = {
    "areal": ("AReaL", areal.convert),
    "trl": ("TRL", trl.convert),
    "unirl": ("UniRL", unirl.convert),
    "verl": ("verl", verl.convert),
}


@dataclass(frozen=True)
class Conversion:
    """A converted recipe.

    Args:
        recipe: plain dicts and lists, as `proxima.config.resolve` takes them.
        text: the same as YAML, each value with its origin; options without an equivalent are comments at the top.
        missing, unsupported, unknown, ignored: values that the file does not give; options without an equivalent.
        problems: why the recipe would not resolve or run here; empty when it would.
        report: the four lists, for a terminal.
    """

    recipe: dict[str, Any]
    text: str
    missing: tuple[Leftover, ...]
    unsupported: tuple[Leftover, ...]
    unknown: tuple[Leftover, ...]
    ignored: tuple[Leftover, ...]
    problems: tuple[str, ...]
    report: tuple[str, ...]


def convert(path: str | Path, peer: str) -> Conversion:
    """Convert a file of `peer`, a key of `PEERS`.

    Raises:
        ConfigError: the file can't be read, or the peer itself would refuse the value of an option.
    """
    name, converter = PEERS[peer]
    o = Options(name, read(Path(path)), str(path))
    draft = converter(o)
    ignored, unsupported, unknown = sort_out(o, RULES[peer])
    draft.ignored += ignored
    draft.unsupported += unsupported
    draft.unknown += unknown
    recipe = draft.tree()
    problems = tuple(problems_of(recipe))
    draft.ignored[:] = dict.fromkeys(draft.ignored)  # once each
    head = f"Made by `proxima convert {path} --from {peer}`: each value is followed by the option it came from."
    if problems:
        head += "\nAs it stands: " + "; ".join(problems)
    return Conversion(
        recipe=recipe,
        text=draft.text(head),
        missing=tuple(draft.missing),
        unsupported=tuple(draft.unsupported),
        unknown=tuple(draft.unknown),
        ignored=tuple(draft.ignored),
        problems=problems,
        report=tuple(draft.report()),
    )


OPENED_LATER = ("model.", "task", "eval.", "data.")  # need to exist only on the machine that trains


def problems_of(recipe: dict[str, Any]) -> Iterator[str]:
    """One line for each problem that stops the recipe; opens no file."""
    try:
        resolved = resolve(recipe)
    except ConfigError as error:
        yield from (str(problem).replace(" (mapping)", "") for problem in error.problems)
        return
    for problem in check(resolved):
        if not problem.path.startswith(OPENED_LATER):
            yield str(problem).replace(" (mapping)", "")


__all__ = ["PEERS", "Conversion", "Leftover", "convert"]
