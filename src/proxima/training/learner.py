"""The trained policy, its optimizer and its loss.

`prepare` runs on the event loop, everything else in the compute thread.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proxima.core.correction.guard import MismatchGuard
from proxima.core.correction.weight_statistics import mismatch_metrics
from proxima.core.hold import FACTOR, Hold
from proxima.core.loss import Surrogate
from proxima.core.metrics import Metrics, merge_metrics
from proxima.data.flow import Key
from proxima.data.pending import Pending
from proxima.data.trajectory import Trajectory
from proxima.model.compute_thread import ComputeThread, Progress
from proxima.model.micro_batch import micro_batches
from proxima.model.policy import Policy
from proxima.training.batch_builder import TrainingBatch
from proxima.training.critic import Critic
from proxima.training.forward_stage import ForwardStage, LogProbStage
from proxima.training.next_policy import NextPolicy
from proxima.training.objectives.policy_objective import PolicyObjective, first_forward
from proxima.training.objectives.protocol import FirstForward, Objective, TokenStatistics
from proxima.training.stack import TrainStack, UpdateResult

BOUND_FACTOR = "bound_factor"  # the fact in a checkpoint


@dataclass(frozen=True)
class HeldBounds:
    """The factor on the bounds of the trust region in the next step, and the rule by which it moves."""

    hold: Hold
    factor: float = 1.0

    def scaled(self, objective: PolicyObjective) -> PolicyObjective:
        """The objective with the step's bounds."""
        return replace(objective, surrogate=objective.surrogate.scaled(self.factor))

    def metrics(self, surrogate: Surrogate) -> dict[str, float]:
        """Metrics of a step, given the surrogate of the recipe: the factor, and the bounds that are set."""
        step = surrogate.scaled(self.factor)
        metrics = {FACTOR: self.factor}
        for name in step.bounds:
            bound = getattr(step, name)
            if bound is not None:
                metrics[f"hold/{name}"] = bound
        return metrics

    def after(self, metrics: Mapping[str, float]) -> "HeldBounds":
        """The bounds of the step after that of these metrics."""
        return replace(self, factor=self.hold.next(self.factor, metrics))


@dataclass(frozen=True, kw_only=True)
class Learner:
    """The policy's weights, the stack that updates them, the loss, and everything else that a step's update needs."""

    policy: Policy
    stack: TrainStack
    objective: Objective[Any]
    stages: Sequence[ForwardStage] = ()  # the forward passes before the update, in order
    critic: Critic | None = None  # a separate model that estimates values; None: no critic, or a head
    updates: int = 1  # optimizer steps of a full batch; the learning rate schedule counts these
    epochs: int = 1  # passes over a batch, unless one ends with an approximate KL above `max_epoch_kl`
    max_epoch_kl: float | None = None  # nats per token; None: no limit
    next_policy: NextPolicy | None = None  # the cache of `next_log_prob`, which runs on the event loop
    held: HeldBounds | None = None  # the bounds of the trust region, if they follow a target
    guard: MismatchGuard = field(default_factory=MismatchGuard)  # acts when rollout engine and trainer differ too much
    known_mismatch: str = ""  # the settings that make the engine differ on purpose
    compute: ComputeThread = field(default_factory=ComputeThread)  # the thread of the tensor work

    async def prepare(self, batch: TrainingBatch, version: int) -> TrainingBatch:
        """Prepare an update, called on the event loop: apply the guard's rejections and fill in `next_log_prob`;
        `version` is that of the current weights."""
        if self.guard.on_mismatch == "reject":
            batch = await self.compute.run(
                without_mismatched, batch, self.stack, self.objective, self.guard, self.stages
            )
        if self.next_policy is not None:
            batch = batch.filled(await self.next_policy.fill(batch.trajectories, version))
        return batch

    def update(self, batch: TrainingBatch, version: int, progress: Progress, *, own: bool = True) -> UpdateResult:
        """Make the critic's optimizer steps, then run the remaining forward stages and make the policy's steps. The
        advantages were computed with the critic before its update.

        Args:
            batch: the training data of the step.
            version: of the current weights.
            progress: called with (tokens done, tokens in all), for the critic and for the policy.
            own: this run's engine generated the completions, so their versions refer to these weights.

        Raises:
            MismatchError: see `MismatchGuard.check_fresh`; the policy is not updated.
            NotFiniteError: the critic or the policy diverged, see `TrainStack.update`.
        """
        critic_metrics: dict[str, float] = {}
        if self.critic is not None:
            critic_metrics = self.critic.update(batch, progress)
        if batch.critic_only:
            return UpdateResult(metrics=critic_metrics)
        trajectories = self.stack.fill(self.stages, batch.trajectories)
        objective = self.objective.at_version(version)
        held_metrics: dict[str, float] = {}
        if self.held is not None:
            assert isinstance(objective, PolicyObjective)
            held_metrics = self.held.metrics(objective.surrogate)
            objective = self.held.scaled(objective)
        items = objective.items(trajectories, batch.updates)
        stop = None
        if self.max_epoch_kl is not None:
            of_all_epochs = sum(map(len, items))
            stop = EarlyStop(self.max_epoch_kl, items=of_all_epochs // self.epochs)
        check = None
        untrained_metrics: dict[str, float] = {}
        if own and self.guard.judges_fresh:
            check = partial(self._check_fresh, version)
            untrained_metrics = self._compare_untrained(items, batch, version)
        result = self.stack.update(objective, items, progress, self.updates, stop, check)
        result.metrics |= untrained_metrics
        if stop is not None and result.updates:
            result.metrics |= stop.figures(self.epochs)
        result.metrics |= critic_metrics | held_metrics
        return result

    def state(self) -> dict[str, Any]:
        """The state to store in a checkpoint besides weights and optimizer."""
        if self.held is None:
            return {}
        return {BOUND_FACTOR: self.held.factor}

    def after(self, metrics: Mapping[str, float]) -> "Learner":
        """The learner of the step after that of these metrics."""
        if self.held is None:
            return self
        return replace(self, held=self.held.after(metrics))

    def _compare_untrained(
        self, updates: Sequence[Sequence[Any]], batch: TrainingBatch, version: int
    ) -> dict[str, float]:
        """If the update skips every item because all advantages are 0, compare engine and trainer on one micro-batch: a
        broken engine looks like this. Returns the `mismatch/` metrics."""
        if not all(self.objective.skippable(item) for item in chain.from_iterable(updates)):
            return {}
        measurable = [item for item in batch.completions if len(item.tokens) and item.behavior_log_prob is not None]
        if not measurable:
            return {}
        cuts = micro_batches(
            [(item,) for item in measurable],
            self.stack.tokens_per_micro_batch,
            share_prompt=self.stack.model.share_prompt,
        )
        sample = [measurable[i] for i in cuts[0]]
        log_probs = self.stack.log_prob(sample)
        statistics = map(TokenStatistics.of_forward, log_probs)
        self._check_fresh(version, list(zip(sample, statistics, strict=True)))
        metrics = mismatch_metrics(first_forward(sample, log_probs))
        return {name: metric.value for name, metric in metrics.items() if math.isfinite(metric.value)}

    def _check_fresh(self, version: int, first: FirstForward) -> None:
        """Run `MismatchGuard.check_fresh` on the loss tokens that this run's weights `version` sampled, before the
        first optimizer step."""
        gaps = [np.empty(0, np.float32)]
        for item, statistics in first:
            if item.behavior_log_prob is None or item.policy_version is None:
                continue
            counted = item.policy_version == version
            if item.loss_mask is not None:
                counted = counted & item.loss_mask
            gaps.append(np.abs(statistics.log_prob - item.behavior_log_prob)[counted])
        self.guard.check_fresh(torch.from_numpy(np.concatenate(gaps)), self.known_mismatch)

    def fill(self, trajectories: Sequence[Trajectory], columns: Set[str]) -> list[Trajectory]:
        """The trajectories with those of `columns` that a stage or the critic fills."""
        wanted = [stage for stage in self.stages if stage.column in columns]
        filled = self.stack.fill(wanted, trajectories)
        if self.critic is None or "value" not in columns:
            return filled
        return self.critic.stack.fill([self.critic.stage], filled)  # `value` and `bootstrap`

    def close(self) -> None:
        """Close the engines of the stages."""
        for stage in self.stages:
            stage.close()

    def stage_metrics(self) -> dict[str, float]:
        """Metrics of `next_policy` for the step that ends; empty without it."""
        if self.next_policy is None:
            return {}
        return self.next_policy.metrics()

    def warnings(self) -> list[str]:
        """Warnings of `next_policy`, each once."""
        if self.next_policy is None:
            return []
        return self.next_policy.warnings()

    def files(self, pending: Pending) -> dict[str, Callable[[Path], None]]:
        """The checkpoint files of `next_policy`."""
        if self.next_policy is None:
            return {}
        return self.next_policy.files(pending)


@dataclass
class EarlyStop:
    """Called by `TrainStack.update` after each update; decides whether another one follows.

        stop after the epoch whose approximate KL > limit

    The approximate KL of an epoch is `approx_kl`, the k3 estimate of KL(pi_prox || pi) over the loss tokens of its
    updates, each measured before it moved the weights. A first epoch of one update thus measures 0. The limit is
    checked after a complete epoch, whose updates are not undone.

    Args:
        limit: nats per token.
        items: number of items in an epoch, which trains on each of them once.
    Edge cases: an epoch without loss tokens never stops the updates.
    Source: PPO implementations since OpenAI Spinning Up, which stop at 1.5 x target_kl.
    Differs: these check single updates (Stable-Baselines3) or the last one of an epoch (CleanRL); here all updates of
        the epoch.
    """

    limit: float
    items: int
    epochs: int = 0
    kl: float = 0.0
    _seen: int = 0
    _metrics: list[Metrics] = field(default_factory=list)

    def __call__(self, items: Sequence[Any], metrics: Metrics) -> bool:
        """Return False to stop, given the `items` and `metrics` of the update just made."""
        self._seen += len(items)
        self._metrics.append(metrics)
        if self._seen < self.items:
            return True
        merged = merge_metrics(self._metrics)
        self.kl = 0.0
        if "approx_kl" in merged:
            self.kl = merged["approx_kl"].value
        self.epochs += 1
        self._seen = 0
        self._metrics = []
        return not self.kl > self.limit

    def figures(self, planned: int) -> dict[str, float]:
        """Metrics of a step with `planned` epochs: the number of complete epochs, the KL of the last, and whether it
        stopped early."""
        return {
            "early_stop/epochs": float(self.epochs),
            "early_stop/kl": self.kl,
            "early_stop/stopped": float(self.epochs < planned),
        }


def without_mismatched(
    batch: TrainingBatch,
    stack: TrainStack,
    objective: Objective[Any],
    guard: MismatchGuard,
    stages: Sequence[ForwardStage],
) -> TrainingBatch:
    """The batch without the completions that the guard rejects, and with the `mismatch/` metrics.

    Completions that the update skips because their advantage is 0 are in no metric and are never rejected, as under
    `warn` and `stop`, which measure in the update's own forward pass.
    """
    candidates = [item for item in batch.trajectories if not objective.skippable(item)]
    if not candidates:
        return batch
    keys = [item.key for item in batch.trajectories]
    log_probs = dict(zip(keys, stack.log_prob(batch.trajectories), strict=True))
    measured = first_forward(candidates, [log_probs[item.key] for item in candidates])
    is_rejected = guard.rejects(measured).tolist()
    rejected = [item.key for item, is_far in zip(candidates, is_rejected, strict=True) if is_far]
    metrics = {name: metric.value for name, metric in mismatch_metrics(measured).items()}
    metrics["mismatch/rejected_seq_fraction"] = len(rejected) / len(candidates)
    if any(map(_repeats, stages)):
        batch = batch.filled(replace(item, proximal_log_prob=log_probs[item.key]) for item in batch.trajectories)
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    remaining = drop_mismatched(batch, {key: TokenStatistics.of_forward(log_probs[key]) for key in rejected})
    return replace(remaining, metrics={**batch.metrics, **finite})


def _repeats(stage: ForwardStage) -> bool:
    """True if a stage would repeat the forward pass that gave the log-probs, and fill nothing else."""
    records_routes = isinstance(stage, LogProbStage) and stage.records_routes
    return stage.column == "proximal_log_prob" and not records_routes


def drop_mismatched(batch: TrainingBatch, statistics: Mapping[Key, TokenStatistics]) -> TrainingBatch:
    """The batch without the trajectories whose keys are in `statistics` (of their first forward pass); their outcome is
    `dropped_mismatch`."""
    updates: list[tuple[Key, ...]] = []
    for update in batch.updates:
        left = tuple(key for key in update if key not in statistics)
        if left:
            updates.append(left)
    return replace(
        batch,
        reasons={**batch.reasons, **dict.fromkeys(statistics, "mismatch")},
        updates=tuple(updates),
        rejected={**batch.rejected, **statistics},
    )
