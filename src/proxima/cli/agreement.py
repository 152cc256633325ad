"""How far scores agree with labels that people gave: `proxima reward score --label`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from proxima.data import UserError
from proxima.data.columns import Floats
from proxima.data.flow import Completion, Group, Prompt


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Scores compared with labels.

    Args:
        labelled: completions with a label and a score.
        pairs: pairs with different labels; of completions of one row, or of all where no row has several.
        ordered: those that the scores put in the order of the labels; equal scores count a half.
        verdicts: completions of which reward and label say whether they are right.
        equal: those of which both say the same.
        kappa: Cohen's, their agreement beyond chance; None: without verdicts, or if either always says the same.
    """

    labelled: int
    pairs: int
    ordered: float
    verdicts: int
    equal: int
    kappa: float | None

    def line(self, label: str) -> str:
        """`agreement with 'human': 41.5 of 48 pairs in its order (0.865), 9 of 10 verdicts equal (kappa 0.78)`."""
        facts = []
        if self.pairs:
            share = self.ordered / self.pairs
            facts.append(f"{self.ordered:,.12g} of {self.pairs:,} pairs in its order ({share:.3f})")
        if self.verdicts:
            if self.kappa is not None:
                kappa = f" (kappa {self.kappa:.2f})"
            else:
                kappa = ""
            facts.append(f"{self.equal:,} of {self.verdicts:,} verdicts equal{kappa}")
        if not facts:
            facts.append(f"the labels of {self.labelled:,} scored completions are all the same")
        return f"agreement with {label!r}: {', '.join(facts)}"


Labels = Sequence[Sequence[float | None]]


def split_labels(
    texts: Sequence[tuple[Prompt, list[Completion]]], column: str, file: str
) -> tuple[list[tuple[Prompt, list[Completion]]], Labels]:
    """The texts without their column of labels, which no reward may read, and the label of each completion.

    Raises:
        UserError: the column is missing, a label is neither a number, true, false nor null, or a row has another number
            of labels than completions.
    """
    kept: list[tuple[Prompt, list[Completion]]] = []
    labels: list[list[float | None]] = []
    for prompt, completions in texts:
        metadata = dict(prompt.metadata)
        place = f"{file}, row {prompt.uid}"
        if column not in metadata:
            columns = ", ".join(metadata) or "none"
            raise UserError(f"{place} has no column {column!r}", remedy=f"name one with --label; columns: {columns}")
        given = metadata.pop(column)
        several = given if isinstance(given, list) else [given]
        if len(several) != len(completions):
            counts = f"{len(several)} labels for {len(completions)} completions"
            raise UserError(f"{place}: column {column!r} has {counts}", remedy="give a list with one for each")
        labels.append([_label(value, f"{place}: column {column!r}") for value in several])
        kept.append((replace(prompt, metadata=metadata), completions))
    return kept, labels


def _label(value: Any, place: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise UserError(f"{place} holds {value!r:.40}, expected a number, true or false")
    return float(value)


def agreement(groups: Sequence[Group], labels: Labels) -> Agreement:
    """Compare the valid scores with the labels, one for each completion of each group."""
    rows = []
    for group, given in zip(groups, labels, strict=True):
        pairs = zip(group.scores, given, strict=True)
        rows.append([(score, label) for score, label in pairs if label is not None and score.valid])
    every = list(chain.from_iterable(rows))
    compared = rows if any(len(row) > 1 for row in rows) else [every]
    ordered = 0.0
    pairs_of_labels = 0
    for row in compared:
        values = np.array([score.value for score, _ in row])
        more_ordered, more_pairs = _ordered(values, np.array([label for _, label in row]))
        ordered += more_ordered
        pairs_of_labels += more_pairs
    judged = [
        (score.correct, label == 1.0) for score, label in every if score.correct is not None and label in (0.0, 1.0)
    ]
    return Agreement(
        labelled=sum(map(len, rows)),
        pairs=pairs_of_labels,
        ordered=ordered,
        verdicts=len(judged),
        equal=sum(ours == theirs for ours, theirs in judged),
        kappa=_kappa(judged),
    )


def _ordered(values: Floats, labels: Floats) -> tuple[float, int]:
    """The number of pairs in the order of the labels, equal values counting a half, and that of all pairs."""
    ordered = 0.0
    pairs = 0
    for i in range(len(labels)):
        sign = np.sign(labels[i + 1 :] - labels[i])
        same = np.sign(values[i + 1 :] - values[i]) * sign
        differ = sign != 0
        pairs += int(differ.sum())
        ordered += float(((same[differ] + 1) / 2).sum())
    return ordered, pairs


def _kappa(judged: Sequence[tuple[bool, bool]]) -> float | None:
    if not judged:
        return None
    count = len(judged)
    ours = sum(said for said, _ in judged) / count
    theirs = sum(said for _, said in judged) / count
    chance = ours * theirs + (1 - ours) * (1 - theirs)
    if chance == 1:
        return None
    equal = sum(a == b for a, b in judged) / count
    return (equal - chance) / (1 - chance)
