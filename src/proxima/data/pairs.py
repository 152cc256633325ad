"""The data of preference learning: pairs of completions, and completions with a label."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from proxima.data.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class PreferencePair:
    """Two completions of one prompt, one preferred to the other.

    Args:
        row: the row number in the data, for messages; also the `group` of both sides, so that they share their prompt.
        chosen, rejected: each ends with the end-of-turn token; `sample` 0 and 1.
        margin: how much better `chosen` is, reward units; None if the data does not say.
    """

    row: int
    chosen: Trajectory
    rejected: Trajectory
    margin: float | None = None

    @property
    def sides(self) -> tuple[Trajectory, ...]:
        """The completions that a reference scores."""
        return self.chosen, self.rejected

    def with_sides(self, sides: Sequence[Trajectory]) -> "PreferencePair":
        """A copy with `sides`, which have further columns, in place of its own."""
        chosen, rejected = sides
        return replace(self, chosen=chosen, rejected=rejected)


@dataclass(frozen=True, kw_only=True)
class LabeledCompletion:
    """A completion that is labeled good or bad, without a pair.

    Args:
        row, completion: as in `PreferencePair`.
        mismatched: the same prompt with the completion of another row, from which KTO estimates its z; None until it is
            assigned.
    """

    row: int
    completion: Trajectory
    good: bool
    mismatched: Trajectory | None = None

    @property
    def sides(self) -> tuple[Trajectory, ...]:
        """The completions that a reference scores."""
        return (self.completion,) if self.mismatched is None else (self.completion, self.mismatched)

    def with_sides(self, sides: Sequence[Trajectory]) -> "LabeledCompletion":
        """A copy with `sides`, which have further columns, in place of its own."""
        return replace(self, completion=sides[0], mismatched=sides[1] if len(sides) > 1 else None)
