"""What preference learning trains on: pairs of completions, and completions with a label."""

from dataclasses import dataclass

from proxima.data.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class PreferencePair:
    """Two completions of one prompt, one preferred to the other.

    Args:
        row: its number in the data, for messages; also the `group` of both sides, so that they share their prompt.
        chosen, rejected: each ends with the end-of-turn token; `sample` 0 and 1.
        margin: by how much `chosen` is better, reward units; None where the data does not say.
    """

    row: int
    chosen: Trajectory
    rejected: Trajectory
    margin: float | None = None

    def __post_init__(self) -> None:
        if self.chosen.group != self.rejected.group:
            raise ValueError(f"PreferencePair: groups {self.chosen.group} and {self.rejected.group} of row {self.row}.")


@dataclass(frozen=True, kw_only=True)
class LabeledCompletion:
    """A completion that is labeled good or bad, without a pair.

    Args:
        row, completion: as in `PreferencePair`.
        mismatched: the same prompt with the completion of another row, from which KTO estimates its z; None before it
            is found.
    """

    row: int
    completion: Trajectory
    good: bool
    mismatched: Trajectory | None = None
