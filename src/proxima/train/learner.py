"""The trained policy and what changes it. Everything here is called in the compute thread."""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from proxima.core.correction import MismatchGuard, mismatch_metrics
from proxima.data import PreferencePair, Trajectory
from proxima.data.columns import Floats
from proxima.model import Policy
from proxima.model.compute_thread import ComputeThread, Progress
from proxima.train import (
    EarlyStop,
    ForwardStage,
    PolicyObjective,
    PreferenceObjective,
    TokenStatistics,
    TrainStack,
    UpdateResult,
)
from proxima.train.batch_builder import StepBatch
from proxima.train.critic import Critic
from proxima.train.next_policy import NextPolicy
from proxima.train.objectives.policy_objective import first_forward

Measured = tuple[Trajectory, Floats]  # with its log-probs under the weights before the update


@dataclass(frozen=True, kw_only=True)
class Learner:
    """The weights, what updates them (the optimizer and all around it), and by which loss."""

    policy: Policy
    stack: TrainStack
    objective: PolicyObjective | PreferenceObjective
    stages: Sequence[ForwardStage] = ()  # the forward passes before the update, in order
    critic: Critic | None = None  # a model of its own that estimates values; None: there is none, or it is a head
    updates: int = 1  # optimizer steps of a full batch; the learning rate schedule counts these
    epochs: int = 1  # passes over a batch, unless one ends with an approximate KL above `max_epoch_kl`
    max_epoch_kl: float | None = None  # nats a token; None: no limit
    next_policy: NextPolicy | None = None  # the cache of `proximal: next`; the loop calls it and no other thread
    guard: MismatchGuard = field(default_factory=MismatchGuard)  # for when rollout engine and trainer differ too much
    compute: ComputeThread = field(default_factory=ComputeThread)  # the thread that all of this runs in

    def update(self, batch: StepBatch, version: int, progress: Progress, *, own: bool = True) -> UpdateResult:
        """The critic's optimizer steps, then the forward stages that have not run yet and the policy's. The advantages
        are those of the critic before its update, whichever comes first.

        Args:
            batch: what the step trains on.
            version: of the present weights.
            progress: called with (tokens done, tokens in all), for the critic and for the policy.
            own: the completions are of this run's engine, so that their versions are those of these weights.

        Raises:
            MismatchError: see `MismatchGuard.check_fresh`. The policy is not updated.
        """
        of_critic = {} if self.critic is None else self.critic.update(batch, progress)
        if batch.policy_waits:
            return UpdateResult(metrics=of_critic)
        trajectories = self.stack.fill(self.stages, batch.trajectories)
        judge = partial(self._check_fresh, version) if own and self.guard.judges_fresh else None
        if isinstance(self.objective, PreferenceObjective):
            return update_on_pairs(
                self.stack, self.objective, trajectories, batch.updates, progress, self.updates, judge
            )
        objective = replace(self.objective, current_version=version)
        stop = None if self.max_epoch_kl is None else EarlyStop(self.max_epoch_kl, items=len(trajectories))

        def judged(first: Mapping[int, TokenStatistics]) -> None:
            if judge is not None:
                judge([(trajectories[i], one.log_prob) for i, one in first.items()])

        result = self.stack.update(objective, batch.updates, trajectories, progress, self.updates, stop, judged)
        if stop is not None and result.updates:
            result.metrics |= stop.figures(self.epochs)
        result.metrics |= of_critic
        return result

    def _check_fresh(self, version: int, measured: Sequence[Measured]) -> None:
        """`MismatchGuard.check_fresh` of the loss tokens that weights `version` sampled."""
        found = [np.empty(0, np.float32)]
        for item, log_prob in measured:
            if item.behavior_log_prob is not None and item.policy_version is not None:
                fresh = item.policy_version == version
                counted = fresh if item.loss_mask is None else fresh & item.loss_mask
                found.append(np.abs(log_prob - item.behavior_log_prob)[counted])
        self.guard.check_fresh(torch.from_numpy(np.concatenate(found)))

    def reject_mismatched(self, batch: StepBatch) -> StepBatch:
        """With `on_mismatch: reject`, the batch without what the guard rejects, with the `mismatch/` metrics.

        Completions that the update skips, because their advantage is 0, are in no figure and are never rejected: the
        same ones as under `warn` and `stop`, which measure in the update's own forward.
        """
        if self.guard.on_mismatch != "reject" or isinstance(self.objective, PreferenceObjective):
            return batch
        seen = [i for i, item in enumerate(batch.trajectories) if not self.objective.skippable(item)]
        if not seen:
            return batch
        log_probs = self.stack.log_prob(batch.trajectories)
        measured = first_forward([batch.trajectories[i] for i in seen], [log_probs[i] for i in seen])
        rejected = [seen[i] for i in self.guard.rejects(measured).nonzero().squeeze(1).tolist()]
        metrics = {name: metric.value for name, metric in mismatch_metrics(measured).items()}
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        rejected_fraction = {"mismatch/rejected_seq_fraction": len(rejected) / len(seen)}
        batch = replace(batch, metrics={**batch.metrics, **finite, **rejected_fraction})
        if any(stage.column == "proximal_log_prob" for stage in self.stages):
            known = zip(batch.trajectories, log_probs, strict=True)
            batch = replace(batch, trajectories=tuple(replace(item, proximal_log_prob=x) for item, x in known))
        nothing = {i: np.zeros(len(log_probs[i]), np.bool_) for i in rejected}
        statistics = {i: TokenStatistics(log_prob=log_probs[i], keep=keep) for i, keep in nothing.items()}
        return batch.reject(statistics, "mismatch")

    def fill(self, trajectories: Sequence[Trajectory], columns: Set[str]) -> list[Trajectory]:
        """The trajectories with those of `columns` that a stage or the critic supplies."""
        filled = self.stack.fill([stage for stage in self.stages if stage.column in columns], trajectories)
        if self.critic is None or "value" not in columns:
            return filled
        return self.critic.stack.fill([self.critic.stage], filled)  # `value` and `bootstrap`

    def close(self) -> None:
        """End the engines that stages ask."""
        for stage in self.stages:
            if (close := getattr(stage, "close", None)) is not None:
                close()


def update_on_pairs(
    stack: TrainStack,
    objective: PreferenceObjective,
    trajectories: Sequence[Trajectory],
    updates: Sequence[Sequence[int]],
    progress: Progress,
    planned: int,
    judge: Callable[[Sequence[Measured]], None] | None = None,
) -> UpdateResult:
    """Online DPO: `TrainStack.update` over the pairs of `best_against_worst`; each side gets its part of the
    statistics. `judge` gets both sides of the first update's pairs before its optimizer step."""
    pairs = best_against_worst(trajectories)
    places = list(pairs)
    number = {i: place for place, sides in enumerate(places) for i in sides}
    plan = [list(dict.fromkeys(number[i] for i in update)) for update in updates]

    def of_sides(found: Mapping[int, TokenStatistics]) -> dict[int, TokenStatistics]:
        statistics: dict[int, TokenStatistics] = {}
        for place, both in found.items():
            first, second = places[place]
            cut = len(trajectories[first].tokens)
            statistics[first] = TokenStatistics(log_prob=both.log_prob[:cut], keep=both.keep[:cut])
            statistics[second] = TokenStatistics(log_prob=both.log_prob[cut:], keep=both.keep[cut:])
        return statistics

    def judged(first: Mapping[int, TokenStatistics]) -> None:
        if judge is not None:
            judge([(trajectories[i], one.log_prob) for i, one in of_sides(first).items()])

    result = stack.update(objective, plan, list(pairs.values()), progress, planned, before_first=judged)
    result.token_statistics = of_sides(result.token_statistics)
    return result


def best_against_worst(trajectories: Sequence[Trajectory]) -> dict[tuple[int, int], PreferencePair]:
    """The two trajectories of each group, the one with the larger advantage chosen; by their positions in the list.

    Raises:
        ValueError: a group has not exactly two, or both have the same advantage.
    """
    members: dict[int, list[int]] = {}
    for i, item in enumerate(trajectories):
        members.setdefault(item.group, []).append(i)
    pairs: dict[tuple[int, int], PreferencePair] = {}
    for group, both in members.items():
        order = sorted(both, key=lambda i: -float(trajectories[i].advantage.mean()))
        values = {float(trajectories[i].advantage.mean()) for i in both}
        if len(order) != 2 or len(values) != 2:
            found = f"{len(order)} completions with advantages {sorted(values)}"
            raise ValueError(f"group {group} has {found}; a pair is two that differ: select with best_and_worst")
        chosen, rejected = order
        pairs[chosen, rejected] = PreferencePair(
            row=group, chosen=trajectories[chosen], rejected=trajectories[rejected]
        )
    return pairs
