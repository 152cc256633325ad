"""From scored groups to what is trained: advantage, selection, and the order of the updates. Pure; runs in prompt
order."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from proxima.core.advantage import needs_baseline
from proxima.core.selection import prompts_factor, select
from proxima.data import Group, Outcomes, Trajectory
from proxima.data.random import EPOCH_ORDER, permutation
from proxima.runtime.rollouts import CompletionRecord
from proxima.train import TokenStatistics


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """What a step trains on, and what became of the rest.

    Args:
        groups: all groups that the step ends: those it could use in the order of their uid, then those that were
            dropped before.
        advantage: of each completion, groups and samples in order; None where the score is invalid.
        reasons: why each completion was dropped; None for those that are trained.
        trajectories: the kept completions.
        rows: for each trajectory, its place among all completions.
        updates: indices into `trajectories`, one list an optimizer step.
    """

    groups: tuple[Group, ...]
    advantage: tuple[float | None, ...]
    reasons: tuple[str | None, ...]
    trajectories: tuple[Trajectory, ...]
    rows: tuple[int, ...]
    updates: tuple[tuple[int, ...], ...]

    @property
    def kept(self) -> list[int]:
        """uids of the groups that have a completion in the update."""
        held = {item.group for item in self.trajectories}
        return [group.prompt.uid for i, group in enumerate(self.groups) if i in held]

    @property
    def dropped(self) -> dict[int, str]:
        """uid → reason, for the groups that have none."""
        kept = set(self.kept)
        return {uid: why for uid, why in _by_group(self.groups, self.reasons).items() if uid not in kept}

    @property
    def drop_counts(self) -> dict[str, int]:
        """Completions by the reason that dropped them."""
        return dict(Counter(reason for reason in self.reasons if reason))

    @property
    def tokens_dropped(self) -> int:
        """Tokens that were generated and not trained on because a selection left them out."""
        completions = (completion for group in self.groups for completion in group.completions)
        return sum(len(c.tokens) for c, reason in zip(completions, self.reasons, strict=True) if reason)

    def records(self, facts: dict[int, TokenStatistics]) -> dict[tuple[int, int, int], CompletionRecord]:
        """What became of each completion, by its key; `facts` by trajectory, from the trainer."""
        place = {trajectory.key: i for i, trajectory in enumerate(self.trajectories)}
        out = {}
        keys = [completion.key for group in self.groups for completion in group.completions]
        for key, advantage, reason in zip(keys, self.advantage, self.reasons, strict=True):
            trajectory = self.trajectories[place[key]] if key in place else None
            fact = facts.get(place[key]) if key in place else None
            if reason is not None:
                outcome = reason if reason == "invalid" else f"dropped_{reason}"
            else:
                outcome = "skipped_zero_advantage" if fact is None else "trained"
            known = {} if fact is None else vars(fact)
            out[key] = CompletionRecord(outcome=outcome, advantage=advantage, trajectory=trajectory, **known)
        return out


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The slots that act before the update.

    Args:
        advantage, selection: specs.
        behavior: which of the engine's log-probs is μ, `untruncated` or `sampled`.
        updates: optimizer steps an epoch; groups are dealt to them in order.
        epochs: passes over the batch; from the second on, groups are dealt in an order drawn by (seed, step, epoch).
    """

    advantage: Any
    selection: Sequence[Any]
    behavior: str = "untruncated"
    updates: int = 1
    epochs: int = 1
    seed: int = 0

    @property
    def needs_baseline(self) -> bool:
        """The advantage compares with the reward of each prompt's greedy completion, so that has to be made."""
        return needs_baseline(self.advantage)

    def prompts_factor(self, size: int) -> int:
        """How many times as many prompts a step takes, with groups of `size`; see `core.selection.prompts_factor`."""
        return prompts_factor(self.selection, size)

    def reject(self, groups: Sequence[Group]) -> dict[int, str]:
        """uid → reason, for the groups that the selections which look at one group at a time drop as a whole."""
        local = tuple(takewhile(lambda spec: spec.local, self.selection))
        outcomes = Outcomes.from_groups(groups)
        keep, reasons = select(local, outcomes, self.advantage(outcomes))
        left = {groups[i].prompt.uid for i in outcomes.group[keep].tolist()}
        return {uid: why for uid, why in _by_group(groups, reasons).items() if uid not in left}

    def step_batch(self, groups: Sequence[Group], step: int, dropped: Sequence[tuple[Group, str]] = ()) -> StepBatch:
        """Advantages over the full groups, then selection, then the deal.

        Args:
            groups: what the step may use.
            step: decides the order of further epochs.
            dropped: groups that were left out before, with the reason; no advantage is computed for them.
        """
        ordered = tuple(sorted(groups, key=lambda group: group.prompt.uid))
        outcomes = Outcomes.from_groups(ordered)
        advantage = self.advantage(outcomes)
        keep, reasons = select(self.selection, outcomes, advantage)
        values = advantage.tolist()
        trajectories: list[Trajectory] = []
        rows: list[int] = []
        row = 0
        for i, group in enumerate(ordered):
            for completion in group.completions:
                if bool(keep[row]):
                    trajectories.append(
                        Trajectory.of(group.prompt, completion, group=i, advantage=values[row], behavior=self.behavior)
                    )
                    rows.append(row)
                row += 1
        valid = outcomes.valid.tolist()
        before = [reason for group, reason in dropped for _ in group.completions]
        return StepBatch(
            groups=(*ordered, *(group for group, _ in dropped)),
            advantage=(
                *(value if ok else None for value, ok in zip(values, valid, strict=True)),
                *(None for _ in before),
            ),
            reasons=(*reasons, *before),
            trajectories=tuple(trajectories),
            rows=tuple(rows),
            updates=self._deal(trajectories, len(ordered), step),
        )

    def _deal(self, trajectories: Sequence[Trajectory], groups: int, step: int) -> tuple[tuple[int, ...], ...]:
        """Whole groups to updates, as evenly as the original groups divide; an update with nothing left is not made."""
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


def _by_group(groups: Sequence[Group], reasons: Sequence[str | None]) -> dict[int, str]:
    """uid → why the group's completions were dropped: what a selection said rather than that some had no score."""
    out: dict[int, str] = {}
    at = 0
    for group in groups:
        own = [reason for reason in reasons[at : at + len(group.completions)] if reason]
        out[group.prompt.uid] = next(
            (reason for reason in reversed(own) if reason != "invalid"), own[0] if own else "empty"
        )
        at += len(group.completions)
    return out
