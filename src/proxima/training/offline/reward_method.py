"""Reward models on the offline loop, and their objective."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxima.core import RewardLoss
from proxima.core.loss import Loss
from proxima.data.packed_batch import PackedBatch
from proxima.data.trajectory import ChatExample, PreferencePair, Trajectory, paths_of
from proxima.evaluation.pair_metrics import ScoredPair, pair_metrics
from proxima.model.architecture import TextConfig
from proxima.model.packed_model import TokenOutputs
from proxima.model.pretrained import LoadedModel
from proxima.model.scalar_model import ScalarModel, last_values, scalar_config, set_score_normalization
from proxima.task.protocol import Row
from proxima.training.forward_stage import ForwardStage
from proxima.training.objectives.protocol import Objective
from proxima.training.offline.method import OfflineMethod
from proxima.training.stack import TrainStack


@dataclass(frozen=True, kw_only=True)
class RewardObjective(Objective[PreferencePair]):
    """`core.RewardLoss` between the scores of the two sides, the mean over the pairs of an update.

        loss = mean_i (-log sigmoid(r(x_i, y_chosen) - r(x_i, y_rejected) - margin_i) + center (…)²)

    A side's score is the scalar head after its last token, see `model.scalar_model.last_values`.

    Args:
        loss: the loss of a pair.
        margin: reward units, by which the chosen side should lead; a pair's own margin takes precedence.
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
        chosen = scored_path(item.chosen).with_sentinel()
        rejected = scored_path(item.rejected).with_sentinel()
        return [
            replace(chosen, reward=np.full(len(chosen.tokens), margin, np.float32)),
            replace(rejected, reward=np.zeros(len(rejected.tokens), np.float32)),
        ]

    def losses(self, batch: PackedBatch, outputs: TokenOutputs, statistics: Any = None) -> list[Loss]:
        assert batch.reward is not None
        chosen, rejected = last_values(batch, outputs.need("value"), self.pad).view(-1, 2).unbind(1)
        margin = batch.reward.index_select(0, batch.cu_seqlens[:-1]).view(-1, 2)[:, 0]
        loss, metrics = self.loss(chosen, rejected, margin)
        count = torch.full((), len(chosen), dtype=torch.float64, device=loss.device)
        return [Loss(loss.sum(dtype=torch.float64), count, metrics)]


@dataclass(frozen=True)
class ScoreStage(ForwardStage):
    """Fills the score of each trajectory, which must be `with_sentinel`, under a model with a scalar head, repeated at
    every token; see `ScalarModel.sequence_scores`."""

    model: ScalarModel
    column: str = "score"

    def pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        return self.model.pack(trajectories)

    def __call__(self, batch: PackedBatch) -> Tensor:
        return torch.repeat_interleave(self.model.sequence_scores(batch), batch.cu_seqlens.diff())


class RewardMethod(OfflineMethod[PreferencePair]):
    """Trains the better completion of a pair to score higher; see `RewardObjective`.

    An evaluation stores mean and standard deviation of the held-out scores in the model's config, where the reward
    `model` reads them (`normalize`).
    """

    headline = "accuracy"
    marks_model = True

    def check(self) -> None:
        scalar_config(self.source.path, self.source.revision, new_head=True)

    def item(self, row: Row, number: int) -> PreferencePair:
        pair: PreferencePair = self.settings.pair(number, row, self.tokenizer, self.context)
        return pair

    def load(self, path: str | None) -> LoadedModel:
        return self.source.load_scalar(path, head_std=self.settings.reward_model.head_std)

    def model(self, loaded: LoadedModel) -> ScalarModel:
        self.scored = self.source.scalar(loaded)
        return self.scored

    def stages(self) -> Sequence[ForwardStage]:
        return [ScoreStage(self.scored)]

    def objective(self) -> RewardObjective:
        section = self.settings.reward_model
        pad = TextConfig.of(self.scored.model.config).pad
        return RewardObjective(loss=RewardLoss(center=section.center), margin=section.margin, pad=pad)

    def measure(self, stack: TrainStack, items: Sequence[PreferencePair]) -> list[ScoredPair]:
        (stage,) = stack.late_stages(self.stages)
        sides: list[Trajectory] = []
        for pair in items:
            sides.append(scored_path(pair.chosen))
            sides.append(scored_path(pair.rejected))
        columns = stack.columns(stage, [side.with_sentinel() for side in sides])[stage.column]
        scores = [float(np.float32(column[0])) for column in columns]
        measured: list[ScoredPair] = []
        for i, pair in enumerate(items):
            scored = ScoredPair(
                question=_question(pair),
                chosen=scores[2 * i],
                rejected=scores[2 * i + 1],
                chosen_length=len(sides[2 * i].tokens),
                rejected_length=len(sides[2 * i + 1].tokens),
            )
            measured.append(scored)
        return measured

    def summarise(self, measured: Sequence[ScoredPair]) -> dict[str, float]:
        metrics = pair_metrics(measured, seed=self.source.seed)
        if metrics["score/std"] > 0:
            set_score_normalization(self.scored.model.config, metrics["score/mean"], metrics["score/std"])
        return metrics


def scored_path(side: Trajectory | ChatExample) -> Trajectory:
    """The sequence of a side that is scored: the last turn, and what precedes it there."""
    return paths_of(side)[-1]


def _question(pair: PreferencePair) -> int:
    """A number that is equal for pairs with the same prompt."""
    return int.from_bytes(blake2b(pair.sides[0].prompt_tokens.tobytes(), digest_size=7).digest(), "big")
