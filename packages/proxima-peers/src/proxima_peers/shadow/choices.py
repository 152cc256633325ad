"""A convention is one choice on each axis of a table; the search tries them all and keeps every one that fits."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Convention = dict[str, str]  # axis → choice; an axis without a meaning beside the others is absent
# The estimates of a KL by their names: the kind of `PENALTIES` and its fields.
ESTIMATES: dict[str, tuple[str, dict[str, Any]]] = {
    "k1": ("k1", {}),
    "k2": ("k2", {}),
    "k3": ("k3", {}),
    "k3 up to 10": ("k3", {"limit": 10.0}),
    "|k1|": ("abs", {}),
}
ATOL = 1e-12  # below it a number is rounding, whatever it was made of


@dataclass(frozen=True)
class TriedConvention:
    """A convention and its number.

    Args:
        value: [] or [B], float64.
        scale: [] or [B], the magnitudes that were added up to it; rounding is relative to them.
    """

    convention: Convention
    value: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Match:
    """A convention that gives the trainer's number; `departures`: its choices that differ from what is stated."""

    convention: Convention
    departures: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, convention: Convention, stated: Convention) -> "Match":
        different = ((axis, choice) for axis, choice in convention.items() if stated.get(axis, choice) != choice)
        return cls(convention, tuple(different))

    def __str__(self) -> str:
        return ", ".join(f"{axis}: {choice}" for axis, choice in self.departures) or "as stated"


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Args:
        matches: the conventions that fit, those with the fewest departures first.
        tried: how many conventions there were.
        by_chance: how likely a wrong number, from half to one and a half times the trainer's, would fit some candidate
            too. 0 for a number for each answer or token.
    """

    matches: tuple[Match, ...]
    tried: int
    by_chance: float = 0.0

    @property
    def nearest(self) -> tuple[Match, ...]:
        """The matches with the fewest departures."""
        least = min((len(match.departures) for match in self.matches), default=0)
        return tuple(match for match in self.matches if len(match.departures) == least)

    @property
    def alike(self) -> dict[str, list[str]]:
        """The choices, by axis, that could stand in the first match and give the same number, though they are farther
        from what is stated."""
        if not self.matches:
            return {}
        first = self.matches[0].convention
        alike: dict[str, list[str]] = {}
        for match in self.matches[len(self.nearest) :]:
            other = [axis for axis in match.convention if match.convention[axis] != first.get(axis)]
            missing = [axis for axis in first if axis not in match.convention]
            if len(other) == 1 and not missing:
                alike.setdefault(other[0], []).append(match.convention[other[0]])
        return alike


def fits(value: Tensor, theirs: Tensor, scale: Tensor, rtol: float) -> bool:
    """True where every number is within the rounding of theirs; NaN is not."""
    return bool(((value - theirs).abs() <= ATOL + rtol * scale.maximum(theirs.abs())).all())


def search(candidates: Iterable[TriedConvention], stated: Convention, theirs: Tensor, rtol: float) -> Found:
    """Try all candidates.

    Args:
        stated: what the dump's settings say, on the same axes.
        theirs: [] or [B], the trainer's number.
        rtol: rounding, relative to the candidates' scale.
    """
    matches = []
    values = []
    near = []
    tried = 0
    for candidate in candidates:
        tried += 1
        if fits(candidate.value, theirs, candidate.scale, rtol):
            matches.append(Match.of(candidate.convention, stated))
        if theirs.dim() == 0:
            values.append(candidate.value)
            near.append(ATOL + rtol * candidate.scale)
    chance = 0.0
    if values:
        chance = covered(torch.stack(values), torch.stack(near), theirs)
    return Found(ranked(matches), tried, chance)


def ranked(matches: Iterable[Match]) -> tuple[Match, ...]:
    """Those with the fewest departures first; otherwise in the order of the table."""
    return tuple(sorted(matches, key=lambda match: len(match.departures)))


def covered(values: Tensor, near: Tensor, theirs: Tensor) -> float:
    """The share of the numbers from half to one and a half times `theirs` [] that are within the distance `near` [C] of
    one of `values` [C]; 0 if theirs is 0."""
    half = float(theirs.abs()) / 2
    known = values.isfinite()
    if not bool(known.any()) or half == 0:
        return 0.0
    least = float(theirs) - half
    most = float(theirs) + half
    low, order = (values - near)[known].clamp(least, most).sort()
    high = (values + near)[known].clamp(least, most)[order]
    reached = high.cummax(0).values
    before = torch.cat([low[:1], reached[:-1]])
    return float((high - low.maximum(before)).clamp(min=0).sum()) / (2 * half)


def first_of_row(values: Tensor, mask: Tensor) -> Tensor:
    """[B] the value at each row's first position in `mask` [B, T]; 0 without one."""
    at = mask.long().argmax(1, keepdim=True)
    first = values.gather(1, at)[:, 0]
    return torch.where(mask.any(1), first, 0.0)
