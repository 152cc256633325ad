"""The objective of KTO: completions with a label, good or bad."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from proxima.core.loss import Loss
from proxima.core.metrics import Metrics, SumCount
from proxima.core.preference.kto import Kto
from proxima.core.preference.protocol import completion_log_prob
from proxima.data.packed_batch import PackedBatch
from proxima.data.pairs import LabeledCompletion
from proxima.data.trajectory import Trajectory
from proxima.model.packed_model import TokenOutputs
from proxima.training.objectives.preference_objective import reference_log_prob
from proxima.training.objectives.protocol import Objective


@dataclass(frozen=True)
class KlAnchor:
    """KTO's z before clamping, [] float; the same for every micro-batch."""

    value: Tensor
    metrics: Metrics

    def take(self, rows: Sequence[int]) -> "KlAnchor":
        return self


@dataclass(frozen=True, kw_only=True)
class KtoObjective(Objective[LabeledCompletion]):
    """`proxima.core.preference.kto.Kto` over whole updates.

    Its z is the mean of log π − log π_ref over the update's prompts, each with the completion of another row, from a
    forward pass without gradient before the update.
    """

    spec: Kto

    @property
    def has_batch_statistics(self) -> bool:
        return self.spec.anchor == "kl"

    def sequences(self, item: LabeledCompletion) -> Sequence[Trajectory]:
        """The label is passed on as the sign of the advantage."""
        return (replace(item.completion, advantage=np.asarray(1 if item.good else -1, np.float32)),)

    def statistics_sequences(self, item: LabeledCompletion) -> Sequence[Trajectory]:
        if item.mismatched is None:
            raise ValueError(f"KTO needs a mismatched completion in every item; row {item.row} lacks it.")
        return (item.mismatched,)

    def batch_statistics(self, parts: Sequence[tuple[PackedBatch, TokenOutputs]]) -> KlAnchor:
        gap = torch.cat([_log_ratio(batch, outputs.need("log_prob")) for batch, outputs in parts])
        return KlAnchor(gap.mean(), {"kl": SumCount.over(gap, torch.ones_like(gap, dtype=torch.bool))})

    def losses(self, batch: PackedBatch, outputs: TokenOutputs, statistics: KlAnchor | None = None) -> list[Loss]:
        good = batch.advantage[batch.cu_seqlens[:-1]] > 0
        ours = completion_log_prob(outputs.need("log_prob"), batch.loss_mask, batch.cu_seqlens)
        reference = completion_log_prob(reference_log_prob(batch), batch.loss_mask, batch.cu_seqlens)
        loss = self.spec(ours, reference, good, 0.0 if statistics is None else statistics.value)
        reward = self.spec.beta * (ours - reference)
        metrics: Metrics = {}
        for side, members in (("chosen", good), ("rejected", ~good)):
            metrics[f"rewards/{side}"] = SumCount.over(reward, members)
            metrics[f"logps/{side}"] = SumCount.over(ours, members)
        return [Loss(loss.sum(dtype=torch.float64), good.new_full((), len(good), dtype=torch.float64), metrics)]


def _log_ratio(batch: PackedBatch, log_prob: Tensor) -> Tensor:
    """[S] log π − log π_ref of the completions."""
    return completion_log_prob(log_prob - reference_log_prob(batch), batch.loss_mask, batch.cu_seqlens)
