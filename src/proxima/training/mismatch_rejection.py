"""`on_mismatch: reject`: before the update, completions on which engine and trainer differ too much leave the batch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from proxima.core.correction.guard import MismatchGuard
from proxima.core.correction.weight_statistics import mismatch_metrics
from proxima.data.flow import Key
from proxima.training.batch_builder import TrainingBatch
from proxima.training.forward_stage import ForwardStage
from proxima.training.objectives.policy_objective import first_forward
from proxima.training.objectives.protocol import Objective, TokenStatistics
from proxima.training.stack import TrainStack


def without_mismatched(
    batch: TrainingBatch,
    stack: TrainStack,
    objective: Objective[Any],
    guard: MismatchGuard,
    stages: Sequence[ForwardStage],
) -> TrainingBatch:
    """The batch without the completions that the guard rejects, and with the `mismatch/` metrics.

    Completions that the update skips, because their advantage is 0, are in no metric and are never rejected, as under
    `warn` and `stop`, which measure in the update's own forward pass.
    """
    seen = [item for item in batch.trajectories if not objective.skippable(item)]
    if not seen:
        return batch
    log_probs = {
        item.key: log_prob
        for item, log_prob in zip(batch.trajectories, stack.log_prob(batch.trajectories), strict=True)
    }
    measured = first_forward(seen, [log_probs[item.key] for item in seen])
    rejected = [seen[i].key for i in guard.rejects(measured).nonzero().squeeze(1).tolist()]
    metrics = {name: metric.value for name, metric in mismatch_metrics(measured).items()}
    metrics["mismatch/rejected_seq_fraction"] = len(rejected) / len(seen)
    proximal = (stage for stage in stages if stage.column == "proximal_log_prob")
    if any(not getattr(stage, "records_routes", False) for stage in proximal):
        batch = batch.filled(replace(item, proximal_log_prob=log_probs[item.key]) for item in batch.trajectories)
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    left = drop_mismatched(batch, {key: TokenStatistics.of_forward(log_probs[key]) for key in rejected})
    return replace(left, metrics={**batch.metrics, **finite})


def drop_mismatched(batch: TrainingBatch, statistics: Mapping[Key, TokenStatistics]) -> TrainingBatch:
    """The batch without the trajectories of these `statistics`, from their first forward pass; their outcome is
    `dropped_mismatch`."""
    updates = (tuple(key for key in update if key not in statistics) for update in batch.updates)
    return replace(
        batch,
        reasons={**batch.reasons, **dict.fromkeys(statistics, "mismatch")},
        updates=tuple(update for update in updates if update),
        rejected={**batch.rejected, **statistics},
    )
