"""What can be prepared, and how: the data sets of `catalog.yaml` (where they are published, their answers and their
prompt), and the user's options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from proxima.data import require

Conflicts = Literal["drop", "first", "majority"]


@dataclass(frozen=True)
class Hub:
    """A data set on the hub.

    Args:
        name: owner/name.
        subsets: configurations to read, in this order; empty: all files.
        license: as its page states; None: unknown.
    """

    name: str
    subsets: tuple[str, ...] = ()
    license: str | None = None


@dataclass(frozen=True)
class Part:
    """One folder prepared from a source.

    Args:
        name: of the folder; evaluation looks for `data/<name>/test.parquet`.
        title: a one-line description.
        hubs: data sets that publish it; the first available one is used.
        side: `train`: training questions, of which a test split is split off if the source has none; `test`: every row
            is an evaluation question.
        answer: key in `ANSWERS`.
        template: key in `TEMPLATES`: the prompt unless `--template` names another.
        reward: a reward that scores it, for the example in the card.
        license: of the questions as first published; None: unknown.
        published: number of published questions per side; a prepared side of another size is reported.
        optional: the source is complete without it.
    """

    name: str
    title: str
    hubs: tuple[Hub, ...]
    side: Literal["train", "test"]
    answer: str
    template: str = "boxed"
    reward: str = "math"
    license: str | None = None
    published: Mapping[str, int] = field(default_factory=dict)
    optional: bool = False


def _part(values: Mapping[str, Any]) -> Part:
    hubs = (Hub(**{**hub, "subsets": tuple(hub.get("subsets", ()))}) for hub in values["hubs"])
    return Part(**{**values, "hubs": tuple(hubs)})


_CATALOG = yaml.safe_load(Path(__file__).with_name("catalog.yaml").read_text(encoding="utf-8"))
SOURCES: dict[str, tuple[Part, ...]] = {name: tuple(map(_part, parts)) for name, parts in _CATALOG.items()}


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The user's options.

    Args:
        template: preset, text or `@file`; None: the part's.
        system: system prompt; empty: none; None: the preset's.
        held_out: share of the questions for testing, by a hash of the question, in [0, 1); None: .02 if the source has
            no test split.
        words: length of an n-gram that is evidence of contamination; 0: whole texts only.
        common: number of training questions above which an n-gram is a phrase, not evidence; 0: no n-gram is.
        conflicts: rule for questions with several answers: `drop`, `first` or `majority`.
        max_unreadable: share of distinct questions without a readable answer above which nothing is written, in [0, 1].
    """

    template: str | None = None
    system: str | None = None
    held_out: float | None = None
    words: int = 13
    common: int = 10
    conflicts: Conflicts = "drop"
    max_unreadable: float = 0.01

    def __post_init__(self) -> None:
        require(self.held_out is None or 0 <= self.held_out < 1, "held_out", self.held_out, "must be in [0, 1)")
        require(self.words >= 0, "words", self.words, "must be >= 0; 0 compares whole texts only")
        require(self.common >= 0, "common", self.common, "must be >= 0; 0 takes no run for a phrase")
        rules = get_args(Conflicts)
        require(self.conflicts in rules, "conflicts", self.conflicts, f"must be one of {', '.join(rules)}")
        require(0 <= self.max_unreadable <= 1, "max_unreadable", self.max_unreadable, "must be in [0, 1]")
