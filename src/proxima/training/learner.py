"""The trained policy, its optimizer and its loss.

`prepare` runs on the event loop, everything else in the compute thread.
"""

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proxima.core.correction.guard import MismatchGuard
from proxima.core.correction.weight_statistics import mismatch_metrics
from proxima.data.trajectory import Trajectory
from proxima.model.compute_thread import ComputeThread, Progress
from proxima.model.micro_batch import micro_batches
from proxima.model.policy import Policy
from proxima.rollout.collector import Pending
from proxima.training.batch_builder import TrainingBatch
from proxima.training.critic import Critic
from proxima.training.early_stop import EarlyStop
from proxima.training.forward_stage import ForwardStage
from proxima.training.mismatch_rejection import without_mismatched
from proxima.training.next_policy import NextPolicy
from proxima.training.objectives.policy_objective import first_forward
from proxima.training.objectives.protocol import FirstForward, Objective, TokenStatistics
from proxima.training.stack import TrainStack, UpdateResult


@dataclass(frozen=True, kw_only=True)
class Learner:
    """The weights, the stack that updates them (the optimizer and all around it), and the loss."""

    policy: Policy
    stack: TrainStack
    objective: Objective[Any]
    stages: Sequence[ForwardStage] = ()  # the forward passes before the update, in order
    critic: Critic | None = None  # a separate model that estimates values; None: no critic, or a head
    updates: int = 1  # optimizer steps of a full batch; the learning rate schedule counts these
    epochs: int = 1  # passes over a batch, unless one ends with an approximate KL above `max_epoch_kl`
    max_epoch_kl: float | None = None  # nats per token; None: no limit
    next_policy: NextPolicy | None = None  # the cache of `next_log_prob`, which runs on the event loop
    guard: MismatchGuard = field(default_factory=MismatchGuard)  # acts when rollout engine and trainer differ too much
    known_mismatch: str = ""  # the settings that make the engine differ on purpose
    compute: ComputeThread = field(default_factory=ComputeThread)  # the thread of the tensor work

    async def prepare(self, batch: TrainingBatch, version: int) -> TrainingBatch:
        """Prepare an update, called on the event loop: apply the guard's rejections and fill in `next_log_prob`;
        `version` is that of the current weights."""
        if self.guard.on_mismatch == "reject":
            how = (self.stack, self.objective, self.guard, self.stages)
            batch = await self.compute.run(without_mismatched, batch, *how)
        if self.next_policy is not None:
            batch = batch.filled(await self.next_policy.fill(batch.trajectories, version))
        return batch

    def update(self, batch: TrainingBatch, version: int, progress: Progress, *, own: bool = True) -> UpdateResult:
        """Make the critic's optimizer steps, then run the remaining forward stages and make the policy's steps. The
        advantages always come from the critic before its update.

        Args:
            batch: the training data of the step.
            version: of the current weights.
            progress: called with (tokens done, tokens in all), for the critic and for the policy.
            own: the completions are from this run's engine, so that their versions refer to these weights.

        Raises:
            MismatchError: see `MismatchGuard.check_fresh`. The policy is not updated.
        """
        of_critic = {} if self.critic is None else self.critic.update(batch, progress)
        if batch.critic_only:
            return UpdateResult(metrics=of_critic)
        trajectories = self.stack.fill(self.stages, batch.trajectories)
        objective = self.objective.at_version(version)
        items = objective.items(trajectories, batch.updates)
        stop = None
        if self.max_epoch_kl is not None:
            stop = EarlyStop(self.max_epoch_kl, items=sum(map(len, items)) // self.epochs)
        look = partial(self._check_fresh, version) if own and self.guard.judges_fresh else None
        compared = self._compare_untrained(items, batch, version) if look is not None else {}
        result = self.stack.update(objective, items, progress, self.updates, stop, look)
        result.metrics |= compared
        if stop is not None and result.updates:
            result.metrics |= stop.figures(self.epochs)
        result.metrics |= of_critic
        return result

    def _compare_untrained(
        self, updates: Sequence[Sequence[Any]], batch: TrainingBatch, version: int
    ) -> dict[str, float]:
        """In a step that trains nothing, so that its update compares nothing, `_check_fresh` on a micro-batch: of an
        engine that is broken, all answers are wrong. Returns the `mismatch/` metrics."""
        known = [(item,) for item in batch.completions if len(item.tokens) and item.behavior_log_prob is not None]
        if not known or not all(self.objective.skippable(item) for update in updates for item in update):
            return {}
        shared = self.stack.model.share_prompt
        sample = [known[i][0] for i in micro_batches(known, self.stack.tokens_per_micro_batch, share_prompt=shared)[0]]
        log_probs = self.stack.log_prob(sample)
        self._check_fresh(version, list(zip(sample, map(TokenStatistics.of_forward, log_probs), strict=True)))
        metrics = mismatch_metrics(first_forward(sample, log_probs))
        return {name: metric.value for name, metric in metrics.items() if math.isfinite(metric.value)}

    def _check_fresh(self, version: int, first: FirstForward) -> None:
        """Run `MismatchGuard.check_fresh` on the loss tokens that weights `version` of this run have sampled, before
        the first optimizer step."""
        gaps = [np.empty(0, np.float32)]
        for item, statistics in first:
            if item.behavior_log_prob is not None and item.policy_version is not None:
                fresh = item.policy_version == version
                counted = fresh if item.loss_mask is None else fresh & item.loss_mask
                gaps.append(np.abs(statistics.log_prob - item.behavior_log_prob)[counted])
        self.guard.check_fresh(torch.from_numpy(np.concatenate(gaps)), self.known_mismatch)

    def fill(self, trajectories: Sequence[Trajectory], columns: Set[str]) -> list[Trajectory]:
        """The trajectories with those of the `columns` that a stage or the critic supplies."""
        filled = self.stack.fill([stage for stage in self.stages if stage.column in columns], trajectories)
        if self.critic is None or "value" not in columns:
            return filled
        return self.critic.stack.fill([self.critic.stage], filled)  # `value` and `bootstrap`

    def close(self) -> None:
        """Close the engines that stages use."""
        for stage in self.stages:
            if (close := getattr(stage, "close", None)) is not None:
                close()

    def stage_metrics(self) -> dict[str, float]:
        """Metrics of `next_policy`, for the step that ends."""
        return {} if self.next_policy is None else self.next_policy.metrics()

    def warnings(self) -> list[str]:
        """Warnings of `next_policy`, each once."""
        return [] if self.next_policy is None else self.next_policy.warnings()

    def files(self, pending: Pending) -> dict[str, Callable[[Path], None]]:
        """The checkpoint files of `next_policy`."""
        return {} if self.next_policy is None else self.next_policy.files(pending)
