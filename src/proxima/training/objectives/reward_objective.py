"""The objective of reward models: pairs of completions, one of them preferred."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from proxima.core import RewardLoss
from proxima.core.loss import Loss
from proxima.data.packed_batch import PackedBatch
from proxima.data.pairs import PreferencePair
from proxima.data.trajectory import Trajectory
from proxima.model.packed_model import TokenOutputs
from proxima.model.scalar_model import last_values
from proxima.training.objectives.protocol import Objective


@dataclass(frozen=True, kw_only=True)
class RewardObjective(Objective[PreferencePair]):
    """`core.RewardLoss` between the scores of the two sides, the mean over the pairs of an update.

        loss = mean_i (-log sigmoid(r(x_i, y_chosen) - r(x_i, y_rejected) - margin_i) + center (…)²)

    A side's score is the scalar head after its last token, see `model.scalar_model.last_values`.

    Args:
        loss: the loss of a pair.
        margin: the margin of a pair without its own margin, by which the chosen side should lead, reward units.
        pad: the padding token of the model's config, which `last_values` skips.
    """

    loss: RewardLoss = field(default_factory=RewardLoss)
    margin: float = 0.0
    pad: int | None = None

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"value"})

    def sequences(self, item: PreferencePair) -> Sequence[Trajectory]:
        """Both sides, which share their prompt; the margin is passed on as the reward of the chosen one."""
        margin = self.margin if item.margin is None else item.margin
        sides = (item.chosen, margin), (item.rejected, 0.0)
        rows = ((side.with_sentinel(), value) for side, value in sides)
        return [replace(row, reward=np.full(len(row.tokens), value, np.float32)) for row, value in rows]

    def losses(self, batch: PackedBatch, outputs: TokenOutputs, statistics: Any = None) -> list[Loss]:
        assert batch.reward is not None
        chosen, rejected = last_values(batch, outputs.need("value"), self.pad).view(-1, 2).unbind(1)
        margin = batch.reward.index_select(0, batch.cu_seqlens[:-1]).view(-1, 2)[:, 0]
        loss, metrics = self.loss(chosen, rejected, margin)
        count = torch.full((), len(chosen), dtype=torch.float64, device=loss.device)
        return [Loss(loss.sum(dtype=torch.float64), count, metrics)]
