"""From scored groups to training batches: advantage, selection, and the order of the updates. Ordered by prompt uid."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxima.core.advantage.protocol import per_role
from proxima.core.reward_kl import KL, RewardKl
from proxima.core.selection.dropping import DropUniformGroups
from proxima.core.selection.protocol import select
from proxima.data import NotFiniteError, UserError
from proxima.data.columns import Bools, Floats
from proxima.data.flow import REPAIR, Completion, Group, Key, Prompt, prompt_name
from proxima.data.outcomes import Outcomes
from proxima.data.pending import Judgement
from proxima.data.players import Contribution, contributions_of
from proxima.data.random import EPOCH_ORDER, permutation
from proxima.data.trajectory import Trajectory
from proxima.training.episode_tokens import TokenCredit
from proxima.training.objectives.echo import observation_weights
from proxima.training.objectives.protocol import TokenStatistics


@dataclass(frozen=True, kw_only=True)
class CompletionRecord:
    """The outcome of one completion in its step.

    Args:
        outcome: `trained`, `skipped_zero_advantage`, `critic_only` (only the critic was trained), `dropped_<reason>` or
            `invalid`.
        used: False if its group was dropped before the step's advantages were computed.
        advantage: reward units, the mean over its loss tokens; None if none was computed.
        trajectory: the trainer's input; None for a completion that was dropped.
        statistics: of the trainer's first forward pass; None without one.
    """

    outcome: str
    used: bool = True
    advantage: float | None = None
    trajectory: Trajectory | None = None
    statistics: TokenStatistics | None = None

    @property
    def token_advantage(self) -> Floats | None:
        """[T] reward units; None if it is the same for all tokens."""
        if self.trajectory is None:
            return None
        values = self.trajectory.advantage
        if not values.size or (values == values[0]).all():
            return None
        return values

    @property
    def token_reward(self) -> Floats | None:
        """[T] reward units, with a KL in the reward or rewards of turns; None if the score at the last loss token is
        the only reward."""
        return None if self.trajectory is None else self.trajectory.reward


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """The training data of a step, and why the rest was dropped."""

    groups: tuple[Group, ...]  # all groups that the step consumes: the usable ones, by uid, then those dropped before
    unused: Set[int] = frozenset()  # uids of the groups dropped before
    completions: tuple[Trajectory, ...]  # of the usable groups, one per path, with their advantages
    reasons: Mapping[Key, str]  # why a path's completion was dropped; absent for those that are trained
    updates: tuple[tuple[Key, ...], ...]  # the paths of each optimizer step
    step: int = 0  # its number, from 1
    critic_only: bool = False  # only the critic is trained in this step
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the KL in the reward, the values and the guard
    rejected: Mapping[Key, TokenStatistics] = field(default_factory=dict)  # after their first forward pass
    compared_by: str = "reward"  # the metric by which `drop_uniform_groups` calls a group uniform

    @cached_property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The completions that are trained."""
        return tuple(item for item in self.completions if item.key not in self.reasons)

    @property
    def valued(self) -> tuple[Trajectory, ...]:
        """The completions with `value` and `returns`, from which a critic learns; those that a selection drops are
        included."""
        return tuple(item for item in self.completions if item.returns is not None)

    def filled(self, trajectories: Iterable[Trajectory]) -> "TrainingBatch":
        """The batch with these trajectories, which have more columns, in place of those with the same keys."""
        by_key = {item.key: item for item in trajectories}
        return replace(self, completions=tuple(by_key.get(item.key, item) for item in self.completions))

    @property
    def usable(self) -> list[Group]:
        """The groups that were not dropped before the advantages, by uid."""
        return [group for group in self.groups if group.prompt.uid not in self.unused]

    @property
    def scored(self) -> set[Key]:
        """The keys of all paths with a valid score, in the usable groups."""
        keys: set[Key] = set()
        for contribution in contributions_of(self.usable):
            if contribution.score.valid:
                keys.update(path.key for path in contribution.paths)
        return keys

    @property
    def kept(self) -> list[int]:
        """uids of the groups with at least one trained completion."""
        trained = {item.uid for item in self.trajectories}
        return [group.prompt.uid for group in self.groups if group.prompt.uid in trained]

    @property
    def dropped(self) -> dict[int, str]:
        """uid → reason, for the groups without a trained completion."""
        return _by_group(self.groups, self.reasons, kept=set(self.kept))

    @property
    def useful(self) -> dict[int, bool]:
        """uid → True for the groups with a trained completion, False for those that are uniform; groups that were
        dropped for other reasons say nothing about their questions."""
        uniform = [uid for uid, reason in self.dropped.items() if reason == DropUniformGroups.reason]
        return dict.fromkeys(uniform, False) | dict.fromkeys(self.kept, True)

    @property
    def judgements(self) -> dict[int, Judgement]:
        """uid → what the group says of its question, for those that `useful` has."""
        useful = self.useful
        judgements: dict[int, Judgement] = {}
        for group in self.groups:
            uid = group.prompt.uid
            if uid in useful:
                judgements[uid] = _judgement(group, self.compared_by, useful[uid])
        return judgements

    @property
    def drop_counts(self) -> dict[str, int]:
        """Number of dropped completions, by reason; an episode counts once, however many of its players are dropped."""
        once = dict.fromkeys((uid, sample, reason) for (uid, sample, _), reason in self.reasons.items())
        return dict(Counter(reason for _, _, reason in once))

    def records(self, statistics: Mapping[Key, TokenStatistics]) -> dict[Key, CompletionRecord]:
        """The outcome of each path of each completion; `statistics` as `TrainStack.update` returns them."""
        by_key = {item.key: item for item in self.completions}
        scored = self.scored
        measured = {**statistics, **self.rejected}
        records: dict[Key, CompletionRecord] = {}
        for key in (path.key for group in self.groups for path in group.paths):
            advantage = None
            if key in scored:
                advantage = completion_advantage(by_key[key])
            trajectory = None
            if key not in self.reasons or key in self.rejected:
                trajectory = by_key.get(key)
            records[key] = CompletionRecord(
                outcome=self._outcome(key, measured.get(key)),
                used=key[0] not in self.unused,
                advantage=advantage,
                trajectory=trajectory,
                statistics=measured.get(key),
            )
        return records

    def _outcome(self, key: Key, statistics: TokenStatistics | None) -> str:
        reason = self.reasons.get(key)
        if reason == "invalid":
            return reason
        if reason:
            return f"dropped_{reason}"
        if self.critic_only:
            return "critic_only"
        if statistics is None:
            return "skipped_zero_advantage"
        return "trained"


@dataclass(frozen=True, kw_only=True)
class BatchBuilder:
    """Builds the batch of a step: advantage, selection and the assignment to updates.

    With `reads_behavior`, the loss reads the engine's log-probs μ, and missing ones raise; otherwise they only feed
    metrics, and a step in which any is missing leaves them all out. `fill` is `Learner.fill`, which runs the forward
    stages that fill some columns; a per-token advantage requests its `needs` from it.
    """

    advantage: Any
    selection: Sequence[Any]
    behavior: str = "untruncated"  # which of the engine's log-probs is μ: this one, or `sampled`
    reads_behavior: bool = True
    needs_sampling_mask: bool = False  # for all completions: sampling is truncated and μ is the sampled distribution
    replays_routes: bool = False  # the trainer sends tokens to the experts that the engine sent them to
    updates: int = 1  # optimizer steps per epoch; groups are assigned to them in order
    epochs: int = 1  # passes over the batch, see `split_into_updates`
    seed: int = 0
    rewards: Sequence[str] = ()  # their names, the columns of `Outcomes.parts`; empty: those that a score has
    fill: Callable[[Sequence[Trajectory], Set[str]], list[Trajectory]] = lambda items, columns: list(items)
    reward_kl: RewardKl | None = None  # that of the next step; None: the score is the reward
    value_warmup: int = 0  # the first steps, in which only the critic is trained
    unscored: bool = False  # completions without a valid score are trained too: the loss reads no reward
    echo: Mapping[str, float] = field(default_factory=dict)  # role → weight of its observations in `Echo`; empty: off
    # whose completions learn from the teacher alone, the others from rewards alone; None: all from both
    taught: Callable[[Prompt], bool] | None = None
    # of the environment's reward in the score of a prompt; each turn pays its reward at its last token
    turn_weight: Callable[[Prompt], float] = lambda prompt: 0.0

    def state(self) -> dict[str, Any]:
        """The state to store in a checkpoint."""
        if self.reward_kl is None:
            return {}
        return {"kl_coefficient": self.reward_kl.coefficient}

    def after(self, batch: TrainingBatch) -> "BatchBuilder":
        """The builder for the step after that of `batch`."""
        if self.reward_kl is None or KL not in batch.metrics:
            return self
        samples = len({key[:2] for key in batch.scored})
        return replace(self, reward_kl=self.reward_kl.after(batch.metrics[KL], samples))

    def reject(self, groups: Sequence[Group]) -> dict[int, str]:
        """uid → reason, for the groups that those selections drop as a whole which see one group at a time.

        A per-token advantage, or one of rewards with a KL, is unknown before the batch is full. The first selection
        that reads it, and all after that one, are then not applied. Groups that learn from the teacher alone are never
        rejected.
        """
        groups = self._judged(groups)
        outcomes = Outcomes.from_groups(groups, self.rewards)
        local = takewhile(lambda spec: spec.local, self.selection)
        if self.advantage.per_token or self.reward_kl is not None:
            advantage = torch.zeros_like(outcomes.reward)
            local = takewhile(lambda spec: "advantage" not in spec.needs, local)
        else:
            advantage = per_role(self.advantage, outcomes, outcomes.role)
        _, reasons = select(tuple(local), outcomes, advantage, unscored=self.unscored)
        judged = contributions_of(groups)
        kept = {each.completion.prompt_uid for each, reason in zip(judged, reasons, strict=True) if reason is None}
        return _by_group(groups, _reasons_by_path(judged, reasons), kept)

    def step_batch(
        self, groups: Sequence[Group], step: int, dropped: Sequence[tuple[Group, str]] = ()
    ) -> TrainingBatch:
        """Compute advantages over the full groups, then select, then assign to updates. Groups that learn from the
        teacher alone are all trained, with or without a score; statistics of rewards leave them out.

        Args:
            groups: the usable groups of the step.
            step: number of the step, which decides the order in epochs after the first.
            dropped: groups that were dropped before, with the reason; they get no advantage.

        Raises:
            UserError: a completion lacks log-probs that the loss reads, or its sampling mask.
            NotFiniteError: the advantage of a completion with a valid score is NaN or infinite.
        """
        ordered = tuple(sorted(groups, key=lambda group: group.prompt.uid))
        judged = self._judged(ordered)
        by_rewards = {group.prompt.uid for group in judged}
        every = self._trajectories(ordered)
        items = [item for item in every if item.uid in by_rewards]
        metrics: dict[str, float] = {}
        reasons: dict[Key, str] = {}
        if judged:
            outcomes = Outcomes.from_groups(judged, self.rewards)
            paid, items, metrics = self._with_token_rewards(judged, outcomes, items)
            advantage, items = self._with_advantages(judged, paid, items)
            _, of_contributions = select(self.selection, outcomes, advantage, unscored=self.unscored)
            reasons = _reasons_by_path(contributions_of(judged), of_contributions)
        if len(judged) < len(ordered):
            own = {item.key: item for item in items}
            items = [own.get(item.key, item) for item in every]
        items = weighted(items, {group.prompt.uid: group.prompt.weight for group in ordered})
        kept = [item for item in items if item.key not in reasons]
        uids = [group.prompt.uid for group in ordered]
        for group, reason in dropped:
            reasons |= {path.key: reason for path in group.paths}
        unused = [group for group, _ in dropped]
        return TrainingBatch(
            groups=(*ordered, *unused),
            unused={group.prompt.uid for group in unused},
            completions=tuple(items),
            reasons=reasons,
            updates=split_into_updates(kept, uids, self.seed, step, updates=self.updates, epochs=self.epochs),
            step=step,
            critic_only=step <= self.value_warmup,
            metrics=metrics,
            compared_by=self._compared_by,
        )

    @property
    def _compared_by(self) -> str:
        return next((spec.metric for spec in self.selection if isinstance(spec, DropUniformGroups)), "reward")

    def _judged(self, groups: Sequence[Group]) -> Sequence[Group]:
        """The groups that learn from their rewards."""
        if self.taught is None:
            return groups
        return [group for group in groups if not self.taught(group.prompt)]

    def _trajectories(self, groups: Sequence[Group]) -> list[Trajectory]:
        """The trajectory of each path of each contribution, with an advantage of 0."""
        build = partial(Trajectory.of, advantage=0.0, behavior=self.behavior, routes=self.replays_routes)
        items: list[Trajectory] = []
        for group, numbers in zip(groups, _prompt_numbers(groups), strict=True):
            for path, number in zip(_paths(group), numbers, strict=True):
                prompt = path.initial_prompt or group.prompt
                items.append(build(prompt, path, group=number))
        if self.taught is not None:
            taught = {group.prompt.uid: np.asarray(self.taught(group.prompt), np.int32) for group in groups}
            items = [replace(item, taught=taught[item.uid]) for item in items]
        if self.echo:
            items = self._with_echo(groups, items)
        return self._with_behavior(items)

    def _with_echo(self, groups: Sequence[Group], items: Sequence[Trajectory]) -> list[Trajectory]:
        """The trajectories with the weights of their observations, times that of their prompt."""
        columns: dict[Key, Floats] = {}
        for group in groups:
            for completion in group.completions:
                weights = observation_weights(completion.paths, self.echo)
                for path, column in zip(completion.paths, weights, strict=True):
                    columns[path.key] = column * np.float32(group.prompt.weight)
        return [replace(item, echo=columns[item.key]) for item in items]

    def _with_token_rewards(
        self, groups: Sequence[Group], outcomes: Outcomes, items: list[Trajectory]
    ) -> tuple[Outcomes, list[Trajectory], dict[str, float]]:
        """For a KL in the reward or a per-token advantage: the outcomes with the KL in their rewards, the trajectories
        with per-token columns, and metrics. Otherwise both unchanged."""
        if not self.advantage.per_token and self.reward_kl is None:
            return outcomes, items, {}
        scored = [each for each in contributions_of(groups) if each.score.valid]
        if not scored:
            return outcomes, items, {}

        weights = {group.prompt.uid: self.turn_weight(group.prompt) for group in groups}
        turn_weights = [weights[each.completion.prompt_uid] for each in scored]
        credit = TokenCredit(
            advantage=self.advantage, reward_kl=self.reward_kl, turn_weights=turn_weights, fill=self.fill
        )
        return credit.pay(scored, outcomes, items)

    def _with_advantages(
        self, groups: Sequence[Group], outcomes: Outcomes, items: list[Trajectory]
    ) -> tuple[Tensor, list[Trajectory]]:
        """The advantage [S] of each contribution, and the trajectories with theirs. If the trajectories already have
        per-token advantages, a contribution's is the mean over its loss tokens, 0 without any."""
        contributions = contributions_of(groups)
        if self.advantage.per_token:
            by_key = {item.key: item for item in items}
            means: list[float] = []
            for contribution in contributions:
                paths = [by_key[path.key] for path in contribution.paths]
                means.append(completion_advantage(*paths))
            advantage = torch.tensor(means, dtype=outcomes.reward.dtype)
        else:  # the same for all tokens of a contribution
            advantage = per_role(self.advantage, outcomes, outcomes.role)
            of_path: dict[Key, Floats] = {}
            for contribution, value in zip(contributions, advantage.tolist(), strict=True):
                of_path |= {path.key: np.asarray(value, np.float32) for path in contribution.paths}
            items = [replace(item, advantage=of_path[item.key]) for item in items]
        count = int((outcomes.valid & ~advantage.isfinite()).sum())
        if count:
            raise NotFiniteError(
                f"{type(self.advantage).__name__} gives {count} completions an advantage of NaN or infinity"
            )
        return advantage, items

    def _with_behavior(self, items: list[Trajectory]) -> list[Trajectory]:
        """The trajectories, either all with μ or all without it.

        Raises:
            UserError: the loss reads μ and a token lacks it, or a completion lacks its sampling mask.
        """
        complete = True
        for item in items:
            where = f"{prompt_name(item.uid)}, sample {item.sample}, turn {item.turn}"
            if self.needs_sampling_mask and item.sampling_mask is None and len(item.tokens):
                remedy = "use an engine with capabilities.sampling_mask, or algorithm.behavior=untruncated"
                raise UserError(f"{where}: the engine did not report which tokens could be sampled", remedy=remedy)
            if item.behavior_log_prob is None:
                continue
            absent = _absent(item, item.behavior_log_prob)
            if absent.any():
                complete = False
                if self.reads_behavior:
                    column = f"{self.behavior}_log_prob"
                    reason = f"{column} of token {absent.argmax()} is absent (NaN), and the loss reads it"
                    raise UserError(f"{where}: {reason} (algorithm.behavior={self.behavior})", remedy=REPAIR)
        if complete:
            return items
        return [replace(item, behavior_log_prob=None) for item in items]


def _judgement(group: Group, metric: str, useful: bool) -> Judgement:
    """What a group says of its question, by the metric in which useful groups differ."""
    outcomes = Outcomes.from_groups([group])
    values = outcomes.metric(metric)
    known = outcomes.valid & values.isfinite()
    if not known.any():  # no reward tells what is right: groups are then compared by their rewards
        values = outcomes.reward.double()
        known = outcomes.valid
    found = values[known]
    right = int((found == 1).sum())
    wrong = int((found == 0).sum())
    if right + wrong < len(found):
        return Judgement(useful=useful, weight=group.prompt.weight)
    return Judgement(useful=useful, right=right, wrong=wrong, weight=group.prompt.weight)


def split_into_updates(
    trajectories: Sequence[Trajectory], groups: Sequence[int], seed: int, step: int, *, updates: int, epochs: int
) -> tuple[tuple[Key, ...], ...]:
    """Assign whole groups to optimizer steps, in equal numbers of the original groups; empty steps are omitted.

    Args:
        trajectories: those to train, in the order of their groups.
        groups: uids of the groups before any selection.
        seed, step: from the second epoch on, groups are assigned in an order drawn by (seed, step, epoch).
        updates: optimizer steps per epoch; groups are assigned to them in order.
        epochs: passes over the trajectories.

    Returns: the keys of the trajectories of each optimizer step.
    """
    keys: dict[int, list[Key]] = {uid: [] for uid in groups}
    for item in trajectories:
        keys[item.uid].append(item.key)
    out: list[tuple[Key, ...]] = []
    for epoch in range(epochs):
        order = list(range(len(groups)))
        if epoch > 0:
            order = permutation(len(groups), EPOCH_ORDER, seed, step, epoch).tolist()
        for update in range(updates):
            first = update * len(groups) // updates
            end = (update + 1) * len(groups) // updates
            out.append(tuple(key for i in order[first:end] for key in keys[groups[i]]))
    return tuple(update for update in out if update)


def weighted(items: Sequence[Trajectory], weights: Mapping[int, float]) -> list[Trajectory]:
    """The trajectories with their advantages times the weight of their prompt, by uid; see `QuestionPool`."""
    out: list[Trajectory] = []
    for item in items:
        weight = weights[item.uid]
        if weight != 1:
            item = replace(item, advantage=item.advantage * np.float32(weight))
        out.append(item)
    return out


def completion_advantage(*paths: Trajectory) -> float:
    """The mean over the loss tokens of a completion's paths, reward units; 0 without any."""
    parts = [item.advantage[item.in_loss] for item in paths]
    if not any(part.size for part in parts):
        return 0.0
    return float(np.concatenate(parts).mean(dtype=np.float64))


def _prompt_numbers(groups: Sequence[Group]) -> Iterator[list[int]]:
    """For each group i, the prompt number of each path: i, or for a path with its own initial prompt i plus a multiple
    of the number of groups."""
    for i, group in enumerate(groups):
        others: list[bytes] = []  # the initial prompts of this group, in the order in which they occur
        numbers: list[int] = []
        for path in _paths(group):
            if path.initial_prompt is None:
                numbers.append(i)
                continue
            prompt = path.initial_prompt.tokens.tobytes()
            if prompt not in others:
                others.append(prompt)
            numbers.append(i + len(groups) * (1 + others.index(prompt)))
        yield numbers


def _paths(group: Group) -> list[Completion]:
    """The paths of a group in the order of its contributions."""
    return [path for each in contributions_of([group]) for path in each.paths]


def _absent(item: Trajectory, column: Floats) -> Bools:
    """[T] bool, True where a token that the policy sampled has no value in `column`."""
    absent: Bools = np.isnan(column)
    if item.sampled is None:
        return absent
    return absent & item.sampled


def _reasons_by_path(contributions: Iterable[Contribution], reasons: Iterable[str | None]) -> dict[Key, str]:
    """Why each path is dropped, from the reason for each contribution; those that are kept are absent."""
    out: dict[Key, str] = {}
    for contribution, reason in zip(contributions, reasons, strict=True):
        if reason is not None:
            out |= {path.key: reason for path in contribution.paths}
    return out


def _by_group(groups: Sequence[Group], reasons: Mapping[Key, str], kept: Set[int]) -> dict[int, str]:
    """uid → reason for the groups not in `kept`; a selection's reason takes precedence over `invalid`."""
    out: dict[int, str] = {}
    for group in groups:
        if group.prompt.uid in kept:
            continue
        of_group = [reasons[c.key] for c in group.completions if c.key in reasons]
        by_selection = [reason for reason in of_group if reason != "invalid"]
        candidates = by_selection or of_group or ["empty"]
        out[group.prompt.uid] = candidates[-1]
    return out
