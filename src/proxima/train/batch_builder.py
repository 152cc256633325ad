"""From scored groups to what is trained: advantage, selection, and the order of the updates. In prompt order."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxima.core.advantage import TokenRewards
from proxima.core.reward_kl import RewardKl
from proxima.core.selection import select
from proxima.data import Group, NotFiniteError, Outcomes, PackedBatch, Trajectory, UserError, pack
from proxima.data.flow import REPAIR, Key
from proxima.data.random import EPOCH_ORDER, permutation
from proxima.train.completion_record import CompletionRecord
from proxima.train.objectives import TokenStatistics

KL = "reward_kl/mean"  # the metric: nats a token, the mean over completions of the mean over their loss tokens


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """What a step trains on, and why the rest was dropped."""

    groups: tuple[Group, ...]  # all that the step consumes: those it could use, by uid, then those dropped before
    unused: Set[int] = frozenset()  # the uids of the latter
    completions: tuple[Trajectory, ...]  # of the groups that it could use, with their advantages
    reasons: Mapping[Key, str]  # why a completion was dropped; absent for those that are trained
    updates: tuple[tuple[Key, ...], ...]  # the completions of each optimizer step
    step: int = 0  # its number, from 1
    critic_only: bool = False  # only the critic is trained in this step
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the KL in the reward, the values and the guard
    rejected: Mapping[Key, TokenStatistics] = field(default_factory=dict)  # after their first forward pass

    @cached_property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The completions that are trained."""
        return tuple(item for item in self.completions if item.key not in self.reasons)

    @property
    def valued(self) -> tuple[Trajectory, ...]:
        """The completions with `value` and `returns`: what a critic learns from. Those that a selection drops are among
        them: they were sampled like the rest."""
        return tuple(item for item in self.completions if item.returns is not None)

    def filled(self, trajectories: Iterable[Trajectory]) -> "TrainingBatch":
        """The batch with these trajectories, which have further columns, in place of those of the same key."""
        by_key = {item.key: item for item in trajectories}
        return replace(self, completions=tuple(by_key.get(item.key, item) for item in self.completions))

    def reject(self, statistics: Mapping[Key, TokenStatistics], reason: str) -> "TrainingBatch":
        """The batch without the trajectories whose `statistics` of the first forward pass these are; their outcome is
        `dropped_<reason>`."""
        updates = (tuple(key for key in update if key not in statistics) for update in self.updates)
        return replace(
            self,
            reasons={**self.reasons, **dict.fromkeys(statistics, reason)},
            updates=tuple(update for update in updates if update),
            rejected={**self.rejected, **statistics},
        )

    @property
    def scored(self) -> set[Key]:
        """The completions with a valid score, of the groups that it could use."""
        used = (group for group in self.groups if group.prompt.uid not in self.unused)
        pairs = (pair for group in used for pair in zip(group.completions, group.scores, strict=True))
        return {completion.key for completion, score in pairs if score.valid}

    @property
    def kept(self) -> list[int]:
        """uids of the groups of which a completion is trained."""
        trained = {item.uid for item in self.trajectories}
        return [group.prompt.uid for group in self.groups if group.prompt.uid in trained]

    @property
    def dropped(self) -> dict[int, str]:
        """uid → reason, for the other groups."""
        return _by_group(self.groups, self.reasons, kept=set(self.kept))

    @property
    def drop_counts(self) -> dict[str, int]:
        """Number of dropped completions, by reason."""
        return dict(Counter(self.reasons.values()))

    def records(self, statistics: Mapping[Key, TokenStatistics]) -> dict[Key, CompletionRecord]:
        """The outcome of each completion; `statistics` as `TrainStack.update` returns them."""
        by_key, scored = {item.key: item for item in self.completions}, self.scored
        measured = {**statistics, **self.rejected}
        return {
            key: CompletionRecord(
                outcome=self._outcome(key, measured.get(key)),
                used=key[0] not in self.unused,
                advantage=completion_advantage(by_key[key]) if key in scored else None,
                trajectory=by_key.get(key) if key not in self.reasons or key in self.rejected else None,
                statistics=measured.get(key),
            )
            for key in (completion.key for group in self.groups for completion in group.completions)
        }

    def _outcome(self, key: Key, statistics: TokenStatistics | None) -> str:
        if reason := self.reasons.get(key):
            return reason if reason == "invalid" else f"dropped_{reason}"
        if self.critic_only:
            return "critic_only"
        return "skipped_zero_advantage" if statistics is None else "trained"


@dataclass(frozen=True, kw_only=True)
class BatchBuilder:
    """The slots that act before the update.

    With `reads_behavior`, the loss reads μ, which every completion must then have; otherwise μ is only measured, and
    left out of a step in which the engine does not give it. `fill` is `Learner.fill`, which runs the forward stages of
    some columns; an advantage of tokens asks it for its `needs`.
    """

    advantage: Any
    selection: Sequence[Any]
    behavior: str = "untruncated"  # which of the engine's log-probs is μ: this one, or `sampled`
    reads_behavior: bool = True
    needs_sampling_mask: bool = False  # of all completions: sampling is truncated and μ is what was sampled
    replays_routes: bool = False  # the trainer sends tokens to the experts that the engine sent them to
    updates: int = 1  # optimizer steps per epoch; groups are dealt to them in order
    epochs: int = 1  # passes over the batch, see `split_into_updates`
    seed: int = 0
    rewards: Sequence[str] = ()  # names of the recipe's, the columns of `Outcomes.parts`; empty: those that a score has
    fill: Callable[[Sequence[Trajectory], Set[str]], list[Trajectory]] = lambda trajectories, columns: [*trajectories]
    reward_kl: RewardKl | None = None  # the KL to the reference in the reward; None: the score is the reward
    kl_coefficient: float | None = None  # what its coefficient is now, where it is not at its start value
    value_warmup: int = 0  # the first steps, in which only the critic is trained
    unscored: bool = False  # completions without a valid score are trained too: what trains them reads no reward

    @property
    def beta(self) -> float:
        """The coefficient of the KL in the reward, in the next step."""
        start = 0.0 if self.reward_kl is None else self.reward_kl.coefficient
        return start if self.kl_coefficient is None else self.kl_coefficient

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {} if self.reward_kl is None else {"kl_coefficient": self.beta}

    def after(self, batch: TrainingBatch) -> "BatchBuilder":
        """For the step after the one of `batch`."""
        if self.reward_kl is None or KL not in batch.metrics:
            return self
        beta = self.reward_kl.next(self.beta, batch.metrics[KL], len(batch.scored))
        return replace(self, kl_coefficient=beta)

    def missing_accuracy_warning(self, groups: Sequence[Group]) -> str:
        """What to tell the user if a selection compares accuracies and no reward gives one; otherwise empty."""
        named = [i for i, spec in enumerate(self.selection) if getattr(spec, "by_accuracy", False)]
        valid = [score for group in groups for score in group.scores if score.valid]
        if not named or not valid or any(score.correct is not None for score in valid):
            return ""
        return (
            f"no reward says which answers are right: algorithm.selection.{named[0]} compares the rewards of a group "
            "in place of their accuracy; set its metric=reward to say so, or give a reward that sets `correct`"
        )

    def reject(self, groups: Sequence[Group]) -> dict[int, str]:
        """uid → reason, for the groups that the selections which look at one group at a time drop as a whole.

        An advantage of tokens, or of rewards with a KL, is not known before the batch is full: the first selection that
        reads it ends the list.
        """
        unknown = {"advantage"} if self.advantage.per_token or self.reward_kl is not None else set[str]()
        local = tuple(takewhile(lambda spec: spec.local and not spec.needs & unknown, self.selection))
        outcomes = Outcomes.from_groups(groups, self.rewards)
        advantage = torch.zeros_like(outcomes.reward) if unknown else self.advantage(outcomes)
        keep, reasons = select(local, outcomes, advantage, unscored=self.unscored)
        kept = {groups[i].prompt.uid for i in outcomes.group[keep].tolist()}
        keys = [completion.key for group in groups for completion in group.completions]
        dropped = {key: reason for key, reason in zip(keys, reasons, strict=True) if reason is not None}
        return _by_group(groups, dropped, kept)

    def step_batch(
        self, groups: Sequence[Group], step: int, dropped: Sequence[tuple[Group, str]] = ()
    ) -> TrainingBatch:
        """Advantages over the full groups, then selection, then the assignment to updates.

        Args:
            groups: what the step may use.
            step: decides the order of further epochs.
            dropped: groups that were dropped before, with the reason; they get no advantage.
        """
        ordered = tuple(sorted(groups, key=lambda group: group.prompt.uid))
        outcomes = Outcomes.from_groups(ordered, self.rewards)
        advantage, items, metrics = self._with_advantages(ordered, outcomes)
        keep, reasons = select(self.selection, outcomes, advantage, unscored=self.unscored)
        dropped_for = {item.key: reason for item, reason in zip(items, reasons, strict=True) if reason is not None}
        dropped_for |= {completion.key: reason for group, reason in dropped for completion in group.completions}
        kept = [item for item, is_kept in zip(items, keep.tolist(), strict=True) if is_kept]
        return TrainingBatch(
            groups=(*ordered, *(group for group, _ in dropped)),
            unused={group.prompt.uid for group, _ in dropped},
            completions=tuple(items),
            reasons=dropped_for,
            updates=split_into_updates(kept, len(ordered), self.seed, step, updates=self.updates, epochs=self.epochs),
            step=step,
            critic_only=step <= self.value_warmup,
            metrics=metrics,
        )

    def _with_advantages(
        self, groups: Sequence[Group], outcomes: Outcomes
    ) -> tuple[Tensor, list[Trajectory], dict[str, float]]:
        """The advantage [S] of each completion, its trajectory, and metrics of the reward. Of an advantage of tokens a
        completion has the mean over its loss tokens, 0 without any."""
        per_token, metrics = self.advantage.per_token, dict[str, float]()
        of_engine: dict[str, Any] = {"behavior": self.behavior, "routes": self.replays_routes}
        items = [
            Trajectory.of(group.prompt, completion, group=i, advantage=0.0, **of_engine)
            for i, group in enumerate(groups)
            for completion in group.completions
        ]
        items = self._with_behavior(items)
        advantage = torch.zeros_like(outcomes.reward)
        rows = outcomes.valid.nonzero().flatten().tolist()
        if rows and (per_token or self.reward_kl is not None):
            needs = {*(self.advantage.needs if per_token else ())}
            if self.reward_kl is not None:
                needs |= {"proximal_log_prob", "reference_log_prob"}
            scored = self.fill([items[row] for row in rows], needs)
            batch = pack(scored)
            reward, total, metrics = self._shaped(outcomes.reward[outcomes.valid], batch)
            if self.reward_kl is not None:
                outcomes = replace(outcomes, reward=outcomes.reward.masked_scatter(outcomes.valid, total))
                scored = _with_column(scored, "reward", reward, batch)
            if per_token:
                columns, of_values = self._token_advantage(reward, scored, batch)
                for name, column in columns.items():
                    scored = _with_column(scored, name, column, batch)
                metrics |= of_values
            for row, item in zip(rows, scored, strict=True):
                items[row] = item
                advantage[row] = completion_advantage(item)
        if not per_token:  # the same for all tokens of a completion
            advantage = self.advantage(outcomes)
            pairs = zip(items, advantage.tolist(), strict=True)
            items = [replace(item, advantage=np.asarray(value, np.float32)) for item, value in pairs]
        if count := int((outcomes.valid & ~advantage.isfinite()).sum()):
            raise NotFiniteError(
                f"{type(self.advantage).__name__} gives {count} completions an advantage of NaN or infinity"
            )
        return advantage, items, metrics

    def _with_behavior(self, items: list[Trajectory]) -> list[Trajectory]:
        """The trajectories, all with μ or all without.

        Raises:
            UserError: the loss reads μ, and a token has none; or a completion lacks its sampling mask.
        """
        complete = True
        for item in items:
            where = f"prompt {item.uid}, sample {item.sample}, turn {item.turn}"
            if self.needs_sampling_mask and item.sampling_mask is None and len(item.tokens):
                remedy = "use an engine with capabilities.sampling_mask, or algorithm.behavior=untruncated"
                raise UserError(f"{where}: the engine did not say which tokens could be sampled", remedy=remedy)
            if item.behavior_log_prob is not None and (absent := np.isnan(item.behavior_log_prob)).any():
                complete = False
                if self.reads_behavior:
                    column = f"{self.behavior}_log_prob"
                    reason = f"{column} of token {absent.argmax()} is absent (NaN), and the loss reads it"
                    raise UserError(f"{where}: {reason} (algorithm.behavior={self.behavior})", remedy=REPAIR)
        return items if complete else [replace(item, behavior_log_prob=None) for item in items]

    def _shaped(self, score: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, dict[str, float]]:
        """The rewards of tokens [N] and of completions [S], and metrics: the score is that of the last loss token."""
        if self.reward_kl is None:
            from proxima.core.advantage.token import place_scores

            return place_scores(score, batch.loss_mask, batch.cu_seqlens), score, {}
        policy = batch.behavior_log_prob if batch.proximal_log_prob is None else batch.proximal_log_prob
        assert policy is not None and batch.reference_log_prob is not None
        shaped = self.reward_kl(score, policy, batch.reference_log_prob, batch.loss_mask, batch.cu_seqlens, self.beta)
        metrics = {KL: shaped.mean_kl, "reward_kl/coefficient": self.beta, "reward_kl/paid": float(shaped.paid.mean())}
        return shaped.reward, shaped.total, metrics

    def _token_advantage(
        self, reward: Tensor, filled: Sequence[Trajectory], batch: PackedBatch
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Columns [N]: `advantage` and, where it reads values, `returns`; and metrics of the values. A completion whose
        `bootstrap` no stage fills ends in a terminal state."""
        needed = {name: getattr(batch, name) for name in self.advantage.needs}
        facts = {"reward": reward, "loss_mask": batch.loss_mask, "cu_seqlens": batch.cu_seqlens, "group": batch.group}
        if "value" not in needed:
            return {"advantage": self.advantage(TokenRewards(**facts | needed))}, {}
        from proxima.core.value import value_metrics

        after = torch.tensor([item.bootstrap for item in filled], dtype=reward.dtype)
        rewards = TokenRewards(bootstrap=after, **facts | needed)
        returns = self.advantage.returns(rewards)
        metrics = value_metrics(rewards, returns, getattr(self.advantage, "gamma", 1.0))
        return {"advantage": self.advantage(rewards), "returns": returns}, metrics


def split_into_updates(
    trajectories: Sequence[Trajectory], groups: int, seed: int, step: int, *, updates: int, epochs: int
) -> tuple[tuple[Key, ...], ...]:
    """Assign whole groups to optimizer steps, as evenly as the original groups divide; an empty one is left out.

    Args:
        trajectories: what is trained; `group` is below `groups`, the number of groups before any selection.
        seed, step: from the second epoch on, groups are dealt in an order drawn by (seed, step, epoch).
        updates: optimizer steps per epoch; groups are dealt to them in order.
        epochs: passes over the trajectories.

    Returns: the keys of the trajectories of each optimizer step.
    """
    out: list[tuple[Key, ...]] = []
    for epoch in range(epochs):
        order = list(range(groups))
        if epoch:
            order = permutation(groups, EPOCH_ORDER, seed, step, epoch).tolist()
        for u in range(updates):
            share = order[u * groups // updates : (u + 1) * groups // updates]
            rank = {group: i for i, group in enumerate(share)}
            members = sorted((item for item in trajectories if item.group in rank), key=lambda item: rank[item.group])
            if members:
                out.append(tuple(item.key for item in members))
    return tuple(out)


def completion_advantage(trajectory: Trajectory) -> float:
    """The mean over its loss tokens, reward units; 0 without any."""
    values = trajectory.advantage if trajectory.loss_mask is None else trajectory.advantage[trajectory.loss_mask]
    return float(values.mean(dtype=np.float64)) if values.size else 0.0


def _with_column(items: Sequence[Trajectory], name: str, values: Tensor, batch: PackedBatch) -> list[Trajectory]:
    """The trajectories with a column of `values` [N], in the order of the batch."""
    columns = np.split(values.numpy(), batch.cu_seqlens[1:-1].tolist())
    filled: list[dict[str, Any]] = [{name: column} for column in columns]
    return [replace(item, **column) for item, column in zip(items, filled, strict=True)]


def _by_group(groups: Sequence[Group], reasons: Mapping[Key, str], kept: Set[int]) -> dict[int, str]:
    """uid → reason of the groups not in `kept`: a selection's rather than that completions have no score."""
    out: dict[int, str] = {}
    for group in groups:
        if group.prompt.uid not in kept:
            of_group = [reasons[c.key] for c in group.completions if c.key in reasons]
            by_selection = [reason for reason in of_group if reason != "invalid"]
            out[group.prompt.uid] = (by_selection or of_group or ["empty"])[-1]
    return out
