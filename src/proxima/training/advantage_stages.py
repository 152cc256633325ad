"""The forward passes that advantages read: of the critic's values, and of the variance of the policy's score."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from proxima.data.packed_batch import PackedBatch
from proxima.data.trajectory import Trajectory
from proxima.model.packed_model import PackedModel


@dataclass(frozen=True)
class ValueStage:
    """Fills `value` from a model with a scalar head, the critic.

    bootstrap: also fills `bootstrap` of truncated completions, from the state after the last token; otherwise it stays
    0.
    """

    model: PackedModel
    bootstrap: bool = True
    column: str = "value"

    def pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        return self.model.pack(
            [item.with_sentinel() if self.bootstrap and item.truncated else item.bare() for item in trajectories]
        )

    def __call__(self, batch: PackedBatch) -> Tensor:
        return self.model.values(batch)


@dataclass(frozen=True)
class ScoreVarianceStage:
    """Fills `score_variance`, 1 − 2 π_t + Σ_v π_v², under the trained policy, for `optimal_token_baseline`."""

    policy: PackedModel
    column: str = "score_variance"

    def pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        return self.policy.pack(trajectories)

    def __call__(self, batch: PackedBatch) -> Tensor:
        outputs = self.policy(batch, frozenset({"log_sum_square"}))
        return 1 - 2 * outputs.need("log_prob").exp() + outputs.need("log_sum_square").exp()
