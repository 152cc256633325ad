"""Conversion: another framework's options become a recipe, with each value's origin, and a list of what has no
equivalent.

    read.py      file → options by dotted name       options.py   which were looked at, what becomes of the others
    verl*.py, trl*.py, areal*.py, unirl.py      up to three files a peer: `convert(options) -> Draft`
    rules.py     what has no equivalent, and whether that matters             common.py   what peers share
    draft.py     the recipe while it is made, and its text
Where a peer means something else by a number, the number is converted and a note says so; nothing of the peer's is
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
        text: the same as YAML, each value with its origin, what has no equivalent as comments on top.
        missing, unsupported, unknown, ignored: what the file does not say; options without an equivalent, by name with
            the reason.
        problems: why the recipe would not resolve or run here; empty when it would.
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
        ConfigError: the file can't be read, or an option has a value that the peer itself would refuse; one line with
            the remedy.
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
    head = f"Made by `proxima convert {path} --from {peer}`: each value stands with the option it came from."
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


OPENED_LATER = ("model.", "task", "eval.", "data.")  # what has to exist only on the machine that trains


def problems_of(recipe: dict[str, Any]) -> Iterator[str]:
    """One line for each thing that stops the recipe; nothing is opened, and paths are not looked at."""
    try:
        resolved = resolve(recipe)
    except ConfigError as error:
        yield from (str(problem).replace(" (mapping)", "") for problem in error.problems)
        return
    for problem in check(resolved):
        if not problem.path.startswith(OPENED_LATER):
            yield str(problem).replace(" (mapping)", "")


__all__ = ["PEERS", "Conversion", "Leftover", "convert"]
