"""The stack of rank 0: whatever it does, the other ranks do too, each with its share."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from proxima.core.metrics import Metrics
from proxima.data import Trajectory
from proxima.data.columns import Floats
from proxima.model import LoadedModel
from proxima.train.forward_stage import ForwardStage
from proxima.train.messages import Fill, Gather, Release, Stages, Update
from proxima.train.objectives.protocol import FirstForward, Objective
from proxima.train.stack import TrainStack, UpdateResult


class LeadingStack(TrainStack):
    """A `TrainStack` that tells the other ranks of each collective call before it makes it; theirs are plain ones."""

    def columns(self, stage: ForwardStage, trajectories: Sequence[Trajectory]) -> dict[str, list[Floats]]:
        if getattr(stage, "on_rank_zero", False):
            return super().columns(stage, trajectories)
        with self.ranks.call(Fill(self.name, stage.column, trajectories)):
            return super().columns(stage, trajectories)

    def late_stages(self, make: Callable[[], Sequence[ForwardStage]]) -> Sequence[ForwardStage]:
        with self.ranks.call(Stages(self.name)):
            return super().late_stages(make)

    def gathered(self, device: torch.device | str = "cpu") -> LoadedModel:
        with self.ranks.call(Gather(self.name)):
            return super().gathered(device)

    def release(self) -> None:
        with self.ranks.call(Release(self.name)):
            super().release()

    def update(
        self,
        objective: Objective[Any],
        updates: Sequence[Sequence[Any]],
        progress: Callable[[int, int], None] | None = None,
        planned: int = 0,
        should_continue: Callable[[Sequence[Any], Metrics], bool] | None = None,
        before_first: Callable[[FirstForward], None] | None = None,
    ) -> UpdateResult:
        with self.ranks.call(Update(self.name, objective, updates, planned, should_continue)):
            return super().update(objective, updates, progress, planned, should_continue, before_first)
