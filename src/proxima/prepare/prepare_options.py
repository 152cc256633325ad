"""The options of data preparation."""

from dataclasses import dataclass
from typing import get_args

from proxima.data import require
from proxima.prepare.deduplicate import Conflicts


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
