"""A training batch from a stream of scored groups; under dynamic sampling, generation continues until it is full.

A generation batch is complete before its groups are judged, and groups are taken in the order of their uid: no group is
preferred because its completions are short and arrive early.
"""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from proxima.data.flow import Completion, Group, Prompt, without_score
from proxima.data.pending import Judgement, Pending
from proxima.rollout.generator import GroupGenerator, RolloutListener
from proxima.rollout.prompt_limits import MAX_OVERSAMPLE, DynamicSampling, running_acceptance
from proxima.task.prompts import PromptSource

STALE = "stale"
SURPLUS = "surplus"
Dropped = tuple[tuple[Group, str], ...]  # groups, each with its reason
Reject = Callable[[Sequence[Group]], Awaitable[Mapping[int, str]]]  # uid → reason, for groups that can't be used
History = Callable[[], Iterable[Mapping[str, Any]]]  # metrics of the finished steps, newest first


@dataclass(frozen=True, kw_only=True)
class Refill:
    """The settings by which generation continues until a batch is full.

    Args:
        sampling: the number of prompts per generation batch, and when to stop.
        reject: returns uid → reason for the groups that the selection would drop as a whole.
        max_unscored: generation batches without a single valid score after which a step is given up; 0: never.
    """

    sampling: DynamicSampling
    reject: Reject
    max_unscored: int = 0

    def gives_up(self, batches: int, groups: Sequence[Group]) -> bool:
        """Return True if enough generation batches were made and none of their groups has a score."""
        return 0 < self.max_unscored <= batches and without_score(groups) == len(groups)


class BatchNotFilled(Exception):
    """The last generation batch of a step left the batch unfilled, and `exhausted` is `stop`.

    Args:
        batches: generation batches made.
        wanted, usable: number of groups in a full batch, and of usable groups so far.
        generated: groups generated in the step.
        dropped: the groups that can't be used.
    """

    def __init__(self, *, batches: int, wanted: int, usable: int, generated: Sequence[Group], dropped: Dropped) -> None:
        self.generated = generated
        self.dropped = dropped
        super().__init__(
            f"{batches} generation batches (max_num_gen_batches) gave {usable} of {wanted} usable groups out of "
            f"{len(generated)} generated"
        )


@dataclass(frozen=True, kw_only=True)
class CollectedBatch:
    """The groups of a step; carried in + generated = used + dropped + carried out.

    Args:
        groups: groups that the step trains on, before the selection within groups; by uid.
        dropped: groups that it doesn't train on, each with the reason.
        generated: groups generated in this step, whether used or not; if asynchronous, those that leave the
            collector in this step, whenever they were generated.
        carried: surplus for the next step.
        gen_batches: number of generation batches.
        version: policy version at the beginning of the step.
        scoring_seconds: time spent waiting for rewards after the last completion.
        accepted: number of generated groups that could be used.
        measured: further metrics of the collector.
    """

    groups: tuple[Group, ...]
    dropped: Dropped = ()
    generated: tuple[Group, ...]
    carried: tuple[Group, ...] = ()
    gen_batches: int = 1
    version: int = 0
    scoring_seconds: float = 0.0
    accepted: int = 0
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def uids(self) -> list[int]:
        """The uids of the groups that leave the collector because the step uses or drops them."""
        used = [group.prompt.uid for group in self.groups]
        dropped = [group.prompt.uid for group, _ in self.dropped]
        return used + dropped

    def metrics(self) -> dict[str, float]:
        """Counts of the step, and the age of the groups that it uses, in policy versions."""
        ages = [group_age(group, self.version) for group in self.groups]
        mean_age = sum(ages) / len(ages) if ages else 0.0
        return {
            "prompts_generated": len(self.generated),
            "prompts_carried": len(self.carried),
            "prompts_accepted": self.accepted,
            "prompts_unscored": without_score(self.generated),
            "gen_batches": self.gen_batches,
            "age/mean": mean_age,
            "age/max": max(ages, default=0),
            **self.measured,
        }


class Collector:
    """The source of the groups of a step. The default methods suit a collector that is inactive between steps.

    Args:
        generator: turns prompts into scored groups; None if the collector generates none.
    """

    generator: GroupGenerator | None
    stage: ClassVar[Literal["generate", "read"]] = "generate"  # of a step, while it collects its groups

    def state(self) -> dict[str, Any]:
        """Return the data cursor, as JSON values that its source can load."""
        raise NotImplementedError

    async def collect(self, version: int, history: History = tuple) -> CollectedBatch:
        """Collect the groups of the next step.

        Args:
            version: policy version of the current weights.
            history: metrics of the finished steps.
        """
        raise NotImplementedError

    def pending(self) -> Pending:
        """Return the groups and prompts currently held for later steps."""
        return Pending()

    def unconsumed(self) -> list[tuple[Prompt, Completion]]:
        """Return all completions not yet used by a step, including those of unfinished groups, each with its prompt."""
        held: list[tuple[Prompt, Completion]] = []
        for group in self.pending().groups:
            held += [(group.prompt, completion) for completion in group.completions]
        return held

    def judged(self, judgements: Mapping[int, Judgement]) -> None:
        """Learn at the end of a step what its groups were; see `PromptSource.judged`."""

    def step_metrics(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return metrics that are known at the end of a step.

        Args:
            seconds: durations of its stages, and of the whole `step`.

        Returns: the result of `EpisodeTimes.taken` if there are episodes, else nothing.
        """
        if self.generator is None or self.generator.episodes is None:
            return {}
        return self.generator.episodes.times.taken()

    def abandon(self) -> None:
        """Stop all work between steps; nothing is collected after this."""


class DrawingCollector(Collector):
    """Base of the collectors that draw prompts from a `source`."""

    source: PromptSource

    def state(self) -> dict[str, Any]:
        return self.source.state()

    def judged(self, judgements: Mapping[int, Judgement]) -> None:
        self.source.judged(judgements)

    def step_metrics(self, seconds: Mapping[str, float]) -> dict[str, float]:
        metrics = super().step_metrics(seconds)
        if self.source.pool is None:
            return metrics
        return metrics | self.source.pool.taken()


class BatchCollector(DrawingCollector):
    """Draws prompts, has them generated and scored, and fills the batch of a step.

    Args:
        generator: turns prompts into scored groups.
        source: gives prompts in order.
        prompts: groups of a full batch.
        refill: None: generate one batch of `prompts` groups and take all of them.
        max_lag: number of policy versions by which a group may be behind when it is used; 0 discards surplus groups.
        listener: notified of the progress of each prompt.
        carried: surplus of the previous step; a resume passes the groups in the checkpoint.
    """

    def __init__(
        self,
        generator: GroupGenerator,
        source: PromptSource,
        *,
        prompts: int,
        refill: Refill | None = None,
        max_lag: int = 1,
        listener: RolloutListener,
        carried: Sequence[Group] = (),
    ) -> None:
        self.generator: GroupGenerator = generator
        self.source = source
        self.prompts = prompts
        self.refill = refill
        self.max_lag = max_lag
        self.listener = listener
        self.carried = tuple(carried)

    def pending(self) -> Pending:
        return Pending(groups=self.carried)

    async def collect(self, version: int, history: History = tuple) -> CollectedBatch:
        """Collect the groups of the next step.

        Args:
            version: policy version of the weights that generate.
            history: read when the running acceptance is needed.

        Raises:
            BatchNotFilled: `max_num_gen_batches` did not fill the batch, and `exhausted` is `stop`.
        """
        usable, dropped = self._split_by_age(version)
        generated: list[Group] = []
        batches = 0
        scoring_seconds = 0.0
        accepted = 0
        given_up = False
        limit = self.refill.sampling.max_num_gen_batches if self.refill else 1
        while len(usable) < self.prompts and not given_up:
            if 0 < limit <= batches:
                break
            missing = self.prompts - len(usable)
            prompts = self._next_prompts(missing, generated, accepted, history)
            fresh = await self._generate(prompts)
            batches += 1
            scoring_seconds += self.generator.scoring_seconds
            generated += fresh
            reasons: Mapping[int, str] = {}
            if self.refill:
                reasons = await self.refill.reject(fresh)
            for group in fresh:
                if group.prompt.uid in reasons:
                    dropped.append((group, reasons[group.prompt.uid]))
                else:
                    usable.append(group)
            accepted += len(fresh) - len(reasons)
            given_up = self.refill is not None and self.refill.gives_up(batches, generated)
        stops = self.refill is not None and self.refill.sampling.exhausted == "stop"
        if given_up or (stops and len(usable) < self.prompts):
            raise BatchNotFilled(
                batches=batches, wanted=self.prompts, usable=len(usable), generated=generated, dropped=tuple(dropped)
            )
        groups = usable[: self.prompts]
        surplus = usable[self.prompts :]
        if self.max_lag == 0:
            dropped += [(group, SURPLUS) for group in surplus]
            surplus = []
        self.carried = tuple(surplus)
        batch = CollectedBatch(
            groups=tuple(groups),
            dropped=tuple(dropped),
            generated=tuple(generated),
            carried=self.carried,
            gen_batches=batches,
            version=version,
            scoring_seconds=scoring_seconds,
            accepted=accepted,
        )
        self.listener.taken(batch.uids)
        return batch

    async def _generate(self, prompts: Sequence[Prompt]) -> list[Group]:
        """Generate one batch; its groups are ordered by uid."""
        self.listener.enqueued(prompts)
        groups: list[Group] = []
        async with aclosing(self.generator.generate(prompts, self.listener)) as stream:
            async for group in stream:
                self.listener.scored(group)
                groups.append(group)
        return sorted(groups, key=lambda group: group.prompt.uid)

    def _split_by_age(self, version: int) -> tuple[list[Group], list[tuple[Group, str]]]:
        """Split the groups carried over, by uid, into those that may be used and those that are too old."""
        carried = sorted(self.carried, key=lambda group: group.prompt.uid)
        self.carried = ()
        usable: list[Group] = []
        stale: list[tuple[Group, str]] = []
        for group in carried:
            if group_age(group, version) <= self.max_lag:
                usable.append(group)
            else:
                stale.append((group, STALE))
        return usable, stale

    def _next_prompts(self, missing: int, generated: Sequence[Group], accepted: int, history: History) -> list[Prompt]:
        """Draw the prompts of the next generation batch."""
        if self.refill is None:
            return self.source.next(missing)
        fixed = self.refill.sampling.generation_batch(self.prompts)
        if fixed is not None:
            return self.source.next(fixed)

        judged = len(generated) - without_score(generated)
        rate = running_acceptance(history(), judged, accepted)
        most = MAX_OVERSAMPLE * self.prompts
        if self.source.pool is None:
            expected = math.ceil(missing / rate)
            return self.source.next(min(expected, most))
        return self.source.next_useful(missing, rate, most)


def group_age(group: Group, version: int) -> int:
    """The number of policy versions by which the group's oldest token is behind; 0 for a group without tokens."""
    oldest = group.oldest_version
    if oldest is None:
        return 0
    return version - oldest
