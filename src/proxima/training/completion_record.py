"""The outcome of one completion in its step: the content of a rollout row besides the completion and its score."""

from dataclasses import dataclass

from proxima.data.columns import Floats
from proxima.data.trajectory import Trajectory
from proxima.training.objectives.protocol import TokenStatistics


@dataclass(frozen=True, kw_only=True)
class CompletionRecord:
    """The outcome of one completion in its step.

    Args:
        outcome: `trained`, `skipped_zero_advantage`, `critic_only` (only the critic was trained), `dropped_<reason>` or
            `invalid`.
        used: False for a group that was dropped before the advantages of the step.
        advantage: reward units, the mean over its loss tokens; None where none was computed.
        trajectory: the trainer's input; None for a completion that was dropped.
        statistics: of the trainer's first forward pass; None without one.
    """

    outcome: str
    used: bool = True
    advantage: float | None = None
    trajectory: Trajectory | None = None
    statistics: TokenStatistics | None = None

    @property
    def token_advantage(self) -> Floats | None:
        """[T] reward units; None if it is the same for all tokens."""
        values = None if self.trajectory is None else self.trajectory.advantage
        return None if values is None or not values.size or (values == values[0]).all() else values

    @property
    def token_reward(self) -> Floats | None:
        """[T] reward units, if it is more than the score on the last loss token: a KL, or rewards of turns."""
        return None if self.trajectory is None else self.trajectory.reward
