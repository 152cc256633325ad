"""From scored groups to what is trained: advantage, selection, and the order of the updates. In prompt order."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxima.core.advantage import TokenRewards
from proxima.core.advantage.token import place_scores
from proxima.core.selection import select
from proxima.data import Group, NotFiniteError, Outcomes, Trajectory, pack
from proxima.data.random import EPOCH_ORDER, permutation
from proxima.runtime.rollouts import CompletionRecord, Key
from proxima.train import TokenStatistics


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """What a step trains on, and why the rest was dropped.

    Args:
        groups: all groups that the step consumes: those it could use, by uid, then those dropped before.
        unused: the uids of the latter.
        advantage: by completion, reward units, the mean over its tokens where they differ; completions without a valid
            score and groups dropped before have none.
        reasons: by completion, why it was dropped; absent for those that are trained.
        trajectories: the completions that are trained.
        updates: indices into `trajectories`, one tuple per optimizer step.
        rejected: the trajectories that were rejected after their first forward pass, with its log-probs.
    """

    groups: tuple[Group, ...]
    unused: Set[int] = frozenset()
    advantage: Mapping[Key, float]
    reasons: Mapping[Key, str]
    trajectories: tuple[Trajectory, ...]
    updates: tuple[tuple[int, ...], ...]
    rejected: Mapping[Key, tuple[Trajectory, TokenStatistics]] = field(default_factory=dict)

    def reject(self, statistics: Mapping[int, TokenStatistics], reason: str) -> "StepBatch":
        """The batch without some of its trajectories.

        Args:
            statistics: of the first forward pass, by index of each trajectory to be rejected.
            reason: why; their outcome is `dropped_<reason>`.
        """
        kept = [i for i in range(len(self.trajectories)) if i not in statistics]
        position = {i: place for place, i in enumerate(kept)}
        updates = (tuple(position[i] for i in update if i in position) for update in self.updates)
        rejected = {self.trajectories[i].key: (self.trajectories[i], values) for i, values in statistics.items()}
        return replace(
            self,
            reasons={**self.reasons, **dict.fromkeys(rejected, reason)},
            trajectories=tuple(self.trajectories[i] for i in kept),
            updates=tuple(update for update in updates if update),
            rejected={**self.rejected, **rejected},
        )

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

    def records(self, statistics: Mapping[int, TokenStatistics]) -> dict[Key, CompletionRecord]:
        """The outcome of each completion; `statistics` by index of the trajectory, as `TrainStack.update` returns."""
        trained = {item.key: (item, statistics.get(i)) for i, item in enumerate(self.trajectories)} | {**self.rejected}
        return {
            completion.key: self._record(completion.key, *trained.get(completion.key, (None, None)))
            for group in self.groups
            for completion in group.completions
        }

    def _record(self, key: Key, trajectory: Trajectory | None, statistics: TokenStatistics | None) -> CompletionRecord:
        if reason := self.reasons.get(key):
            outcome = reason if reason == "invalid" else f"dropped_{reason}"
        else:
            outcome = "skipped_zero_advantage" if statistics is None else "trained"
        tokens = {} if statistics is None else vars(statistics)
        return CompletionRecord(
            outcome=outcome,
            used=key[0] not in self.unused,
            advantage=self.advantage.get(key),
            trajectory=trajectory,
            **tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The slots that act before the update.

    Args:
        advantage, selection: specs.
        behavior: which of the engine's log-probs is μ, `untruncated` or `sampled`.
        updates: optimizer steps per epoch; groups are dealt to them in order.
        epochs: passes over the batch; from the second on, groups are dealt in an order drawn by (seed, step, epoch).
        rewards: names of the recipe's rewards, the columns of `Outcomes.parts`; empty: those that a score has.
        fill: runs the forward stages of some columns, `Learner.fill`; an advantage of tokens asks it for its `needs`.
    """

    advantage: Any
    selection: Sequence[Any]
    behavior: str = "untruncated"
    updates: int = 1
    epochs: int = 1
    seed: int = 0
    rewards: Sequence[str] = ()
    fill: Callable[[Sequence[Trajectory], Set[str]], list[Trajectory]] = lambda trajectories, columns: [*trajectories]

    def unjudged(self, groups: Sequence[Group]) -> str:
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

        An advantage of tokens is not known before the batch is full: the first selection that reads it ends the list.
        """
        unknown = {"advantage"} if self.advantage.per_token else set[str]()
        local = tuple(takewhile(lambda spec: spec.local and not spec.needs & unknown, self.selection))
        outcomes = Outcomes.from_groups(groups, self.rewards)
        advantage = torch.zeros_like(outcomes.reward) if unknown else self.advantage(outcomes)
        keep, reasons = select(local, outcomes, advantage)
        kept = {groups[i].prompt.uid for i in outcomes.group[keep].tolist()}
        keys = [completion.key for group in groups for completion in group.completions]
        dropped = {key: reason for key, reason in zip(keys, reasons, strict=True) if reason is not None}
        return _by_group(groups, dropped, kept)

    def step_batch(self, groups: Sequence[Group], step: int, dropped: Sequence[tuple[Group, str]] = ()) -> StepBatch:
        """Advantages over the full groups, then selection, then the assignment to updates.

        Args:
            groups: what the step may use.
            step: decides the order of further epochs.
            dropped: groups that were dropped before, with the reason; they get no advantage.
        """
        ordered = tuple(sorted(groups, key=lambda group: group.prompt.uid))
        outcomes = Outcomes.from_groups(ordered, self.rewards)
        advantage, items = self._with_advantages(ordered, outcomes)
        keep, reasons = select(self.selection, outcomes, advantage)
        trajectories: list[Trajectory] = []
        advantages: dict[Key, float] = {}
        dropped_for: dict[Key, str] = {}
        columns = (advantage.tolist(), outcomes.valid.tolist(), keep.tolist(), reasons)
        for item, value, valid, kept, reason in zip(items, *columns, strict=True):
            if valid:
                advantages[item.key] = value
            if reason is not None:
                dropped_for[item.key] = reason
            if kept:
                trajectories.append(item)
        dropped_for |= {completion.key: reason for group, reason in dropped for completion in group.completions}
        return StepBatch(
            groups=(*ordered, *(group for group, _ in dropped)),
            unused={group.prompt.uid for group, _ in dropped},
            advantage=advantages,
            reasons=dropped_for,
            trajectories=tuple(trajectories),
            updates=self._deal(trajectories, len(ordered), step),
        )

    def _with_advantages(self, groups: Sequence[Group], outcomes: Outcomes) -> tuple[Tensor, list[Trajectory]]:
        """The advantage [S] of each completion, and its trajectory. Where the advantage is one of tokens, a completion
        has the mean over its loss tokens, 0 without any."""
        per_token = self.advantage.per_token
        advantage = torch.zeros_like(outcomes.reward) if per_token else self.advantage(outcomes)
        completions = [
            (i, group.prompt, completion) for i, group in enumerate(groups) for completion in group.completions
        ]
        items = [
            Trajectory.of(prompt, completion, group=i, advantage=value, behavior=self.behavior)
            for (i, prompt, completion), value in zip(completions, advantage.tolist(), strict=True)
        ]
        rows = outcomes.valid.nonzero().flatten().tolist()
        if per_token and rows:
            for row, item in zip(
                rows, self._with_token_advantages([items[row] for row in rows], outcomes), strict=True
            ):
                items[row] = item
                values = item.advantage if item.loss_mask is None else item.advantage[item.loss_mask]
                advantage[row] = float(values.mean(dtype=np.float64)) if values.size else 0.0
        if count := int((outcomes.valid & ~advantage.isfinite()).sum()):
            raise NotFiniteError(
                f"{type(self.advantage).__name__} gives {count} completions an advantage of NaN or infinity"
            )
        return advantage, items

    def _with_token_advantages(self, scored: Sequence[Trajectory], outcomes: Outcomes) -> list[Trajectory]:
        """The trajectories of all completions with a score, after the forward stages that the advantage needs.

        The score is the reward of the last loss token. Nothing estimates the value after the last token of a truncated
        completion: `bootstrap` is 0, as in verl and TRL.
        """
        filled = self.fill(scored, self.advantage.needs)
        batch = pack(filled)
        reward = place_scores(outcomes.reward[outcomes.valid], batch.loss_mask, batch.cu_seqlens)
        needed = {name: getattr(batch, name) for name in self.advantage.needs}
        rewards = TokenRewards(reward=reward, loss_mask=batch.loss_mask, cu_seqlens=batch.cu_seqlens, **needed)
        columns = np.split(self.advantage(rewards).numpy(), batch.cu_seqlens[1:-1].tolist())
        return [replace(item, advantage=values) for item, values in zip(filled, columns, strict=True)]

    def _deal(self, trajectories: Sequence[Trajectory], groups: int, step: int) -> tuple[tuple[int, ...], ...]:
        """Assign whole groups to updates, as evenly as the original groups divide; an empty update is left out."""
        out: list[tuple[int, ...]] = []
        for epoch in range(self.epochs):
            order = list(range(groups))
            if epoch:
                order = permutation(groups, EPOCH_ORDER, self.seed, step, epoch).tolist()
            for u in range(self.updates):
                share = order[u * groups // self.updates : (u + 1) * groups // self.updates]
                rank = {group: i for i, group in enumerate(share)}
                members = [i for i, item in enumerate(trajectories) if item.group in rank]
                members.sort(key=lambda i: (rank[trajectories[i].group], i))
                if members:
                    out.append(tuple(members))
        return tuple(out)


def _by_group(groups: Sequence[Group], reasons: Mapping[Key, str], kept: Set[int]) -> dict[int, str]:
    """uid → reason of the groups not in `kept`: a selection's rather than that completions have no score."""
    out: dict[int, str] = {}
    for group in groups:
        if group.prompt.uid not in kept:
            found = [reasons[c.key] for c in group.completions if c.key in reasons]
            by_selection = [reason for reason in found if reason != "invalid"]
            out[group.prompt.uid] = (by_selection or found or ["empty"])[-1]
    return out
