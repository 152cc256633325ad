"""The trained policy and what changes it. Everything here is called in the compute thread."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np

from proxima.core.correction import MismatchGuard, mismatch_metrics
from proxima.data import Trajectory
from proxima.model import Policy
from proxima.model.compute_thread import ComputeThread, Progress
from proxima.runtime.algorithm import StepBatch
from proxima.runtime.critic import Critic
from proxima.runtime.next_policy import NextPolicy
from proxima.runtime.online_pairs import update_on_pairs
from proxima.train import (
    EarlyStop,
    ForwardStage,
    PolicyObjective,
    PreferenceObjective,
    TokenStatistics,
    TrainStack,
    UpdateResult,
)
from proxima.train.objectives.policy_objective import first_forward


@dataclass(frozen=True, kw_only=True)
class Learner:
    """The weights, what updates them, and by which loss.

    Args:
        policy, stack, objective: the weights, the optimizer and all around it, and the loss.
        stages: the forward passes before the update, in order.
        critic: a model of its own that estimates values; None: there is none, or it is a head on the policy.
        updates: optimizer steps of a full batch; the learning rate schedule counts these.
        epochs: passes over a batch, unless one ends with an approximate KL above `max_epoch_kl`, nats a token; None: no
            limit.
        next_policy: the cache of `proximal: next`, which the loop calls and no other thread; None: off.
        guard: what is done when rollout engine and trainer differ too much.
        compute: the thread that all of this runs in.
    """

    policy: Policy
    stack: TrainStack
    objective: PolicyObjective | PreferenceObjective
    stages: Sequence[ForwardStage] = ()
    critic: Critic | None = None
    updates: int = 1
    epochs: int = 1
    max_epoch_kl: float | None = None
    next_policy: NextPolicy | None = None
    guard: MismatchGuard = field(default_factory=MismatchGuard)
    compute: ComputeThread = field(default_factory=ComputeThread)

    def update(self, batch: StepBatch, version: int, progress: Progress) -> UpdateResult:
        """The critic's optimizer steps, then the forward stages that have not run yet and the policy's. The advantages
        are those of the critic before its update, whichever comes first.

        Args:
            batch: what the step trains on.
            version: of the present weights.
            progress: called with (tokens done, tokens in all), for the critic and for the policy.
        """
        of_critic = {} if self.critic is None else self.critic.update(batch, progress)
        if batch.policy_waits:
            return UpdateResult(metrics=of_critic)
        trajectories = self.stack.fill(self.stages, batch.trajectories)
        if isinstance(self.objective, PreferenceObjective):
            return update_on_pairs(
                self.stack, self.objective, trajectories, batch.updates, progress, planned=self.updates
            )
        objective = replace(self.objective, current_version=version)
        stop = None if self.max_epoch_kl is None else EarlyStop(self.max_epoch_kl, items=len(trajectories))
        result = self.stack.update(objective, batch.updates, trajectories, progress, self.updates, go_on=stop)
        if stop is not None and result.updates:
            result.metrics |= stop.figures(self.epochs)
        result.metrics |= of_critic
        return result

    def reject_mismatched(self, batch: StepBatch) -> tuple[StepBatch, dict[str, float]]:
        """With `on_mismatch: reject`, the batch without what the guard rejects, and the `mismatch/` metrics.

        Completions that the update skips, because their advantage is 0, are in no figure and are never rejected: the
        same ones as under `warn` and `stop`, which measure in the update's own forward.
        """
        if self.guard.on_mismatch != "reject" or isinstance(self.objective, PreferenceObjective):
            return batch, {}
        seen = [i for i, item in enumerate(batch.trajectories) if not self.objective.skippable(item)]
        if not seen:
            return batch, {}
        log_probs = self.stack.log_prob(batch.trajectories)
        measured = first_forward([batch.trajectories[i] for i in seen], [log_probs[i] for i in seen])
        rejected = [seen[i] for i in self.guard.rejects(measured).nonzero().squeeze(1).tolist()]
        metrics = {name: metric.value for name, metric in mismatch_metrics(measured).items()}
        metrics["mismatch/rejected_seq_fraction"] = len(rejected) / len(seen)
        if any(stage.column == "proximal_log_prob" for stage in self.stages):
            known = zip(batch.trajectories, log_probs, strict=True)
            batch = replace(batch, trajectories=tuple(replace(item, proximal_log_prob=x) for item, x in known))
        nothing = {i: np.zeros(len(log_probs[i]), np.bool_) for i in rejected}
        statistics = {i: TokenStatistics(log_prob=log_probs[i], keep=keep) for i, keep in nothing.items()}
        return batch.reject(statistics, "mismatch"), metrics

    def fill(self, trajectories: Sequence[Trajectory], columns: Set[str]) -> list[Trajectory]:
        """The trajectories with those of `columns` that a stage or the critic supplies."""
        filled = self.stack.fill([stage for stage in self.stages if stage.column in columns], trajectories)
        return filled if self.critic is None or "value" not in columns else self.critic.fill(filled)

    def close(self) -> None:
        """End the engines that stages ask."""
        for stage in self.stages:
            if (close := getattr(stage, "close", None)) is not None:
                close()
