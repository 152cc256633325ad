"""From prompts to the scored groups of a step: generate, score, and, under dynamic sampling, generate again until the
batch is full.

A generation batch is drawn, generated and scored as a whole before anyone judges it, and groups are taken in the order
of their uid: a group is never preferred because its completions were short and came early.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from proxima.config.schema import DynamicSamplingConfig
from proxima.data import Completion, Group, Prompt
from proxima.engine.protocol import Engine, Request, Sampling
from proxima.reward.runner import RewardRunner
from proxima.runtime.algorithm import Algorithm
from proxima.runtime.clock import Clock
from proxima.runtime.journal import Journal
from proxima.runtime.observer import Observer
from proxima.task.prompts import PromptSource

# finished steps that generated, whose counts make the running acceptance: early in a run it changes from step to step
REMEMBERED = 3
GREATEST_OVERSAMPLE = 4  # batches: what the running acceptance may make of one generation batch
STALE, SURPLUS = "stale", "surplus"


class CannotGoOn(Exception):
    """The run ends, and nothing in it is broken; the text says what was found and what to do.

    Args:
        dropped: groups of the unfinished step, to be looked at.
    """

    def __init__(self, text: str, dropped: Sequence[tuple[Group, str]] = ()) -> None:
        super().__init__(text)
        self.dropped = tuple(dropped)


class BatchNotFilled(CannotGoOn):
    """The last generation batch is made and the batch is not full."""


class NothingScored(CannotGoOn):
    """The scorers have failed on every completion of several steps."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The groups of a step, and the account of them: carried in + generated = used + dropped + carried.

    Args:
        groups: what the step trains on, before the selection within groups; by uid.
        dropped: the groups it does not, with the reason of each.
        generated: the groups generated in this step, wherever they ended.
        carried: surplus for the next step.
        gen_batches: generation batches made.
        version: of the weights that the step begins with.
        scoring: seconds spent waiting for scores after the last completion was there.
        accepted, unscored: of the groups generated, those that could be used when they were judged, and those without a
            valid score.
    """

    groups: tuple[Group, ...]
    dropped: tuple[tuple[Group, str], ...] = ()
    generated: tuple[Group, ...]
    carried: tuple[Group, ...] = ()
    gen_batches: int = 1
    version: int = 0
    scoring: float = 0.0
    accepted: int = 0
    unscored: int = 0

    def metrics(self) -> dict[str, float]:
        """What was made for the step, and the age of what it uses, in policy versions."""
        ages = [group_age(group, self.version) for group in self.groups]
        return {
            "prompts_generated": len(self.generated),
            "prompts_carried": len(self.carried),
            "prompts_accepted": self.accepted,
            "prompts_unscored": self.unscored,
            "gen_batches": self.gen_batches,
            "age/mean": sum(ages) / len(ages) if ages else 0.0,
            "age/max": max(ages, default=0),
        }


@dataclass(kw_only=True)
class Collector:
    """Draws prompts, has them completed and scored, and fills the batch.

    Args:
        prompts, completions, sampling, seed: groups of a step, completions of a group, and how they are drawn.
        refill: None makes one generation batch of `prompts` groups and takes it as it is.
        source, engine, rewards, algorithm, journal, clock, observer: as in `Controller`.
        unless_stopped: awaits, or raises when the user asks the run to end.
        carried: surplus of the step before; a resume puts here what the checkpoint held.
    """

    prompts: int
    completions: int
    sampling: Sampling
    seed: int
    source: PromptSource
    engine: Engine
    rewards: RewardRunner
    algorithm: Algorithm
    journal: Journal
    clock: Clock
    observer: Observer
    unless_stopped: Callable[[Awaitable[Any]], Awaitable[Any]]
    refill: DynamicSamplingConfig | None = None
    carried: list[Group] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._arrivals: asyncio.Queue[Group | BaseException] = asyncio.Queue()
        self._rollouts: set[asyncio.Task[None]] = set()
        self._completed_at = 0.0
        self._scoring = 0.0

    async def collect(self) -> Collected:
        """The groups of the next step.

        Raises:
            BatchNotFilled: `max_num_gen_batches` did not fill the batch, and `exhausted` is `stop`.
        """
        version = self.journal.version
        self._scoring = 0.0
        usable, dropped = self._still_fresh(version)
        generated: list[Group] = []
        batches = 0
        while len(usable) < self.prompts and not self._exhausted(batches):
            fresh = await self.generate(self._how_many(self.prompts - len(usable), generated, usable))
            batches += 1
            generated += fresh
            reasons = self.algorithm.unusable(fresh) if self.refill else {}
            usable += [group for group in fresh if group.prompt.uid not in reasons]
            dropped += [(group, reasons[group.prompt.uid]) for group in fresh if group.prompt.uid in reasons]
        if len(usable) < self.prompts and self.refill and self.refill.exhausted == "stop":
            raise BatchNotFilled(self._not_filled(usable, generated, dropped, batches), dropped)
        groups, surplus = usable[: self.prompts], usable[self.prompts :]
        if self.refill and self.refill.max_age == 0:
            dropped, surplus = dropped + [(group, SURPLUS) for group in surplus], []
        self.carried = surplus
        return Collected(
            groups=tuple(groups),
            dropped=tuple(dropped),
            generated=tuple(generated),
            carried=tuple(surplus),
            gen_batches=batches,
            version=version,
            scoring=self._scoring,
            accepted=len(_among(usable, generated)),
            unscored=_unscored(generated),
        )

    async def generate(self, count: int) -> list[Group]:
        """One generation batch: `count` prompts drawn, completed and scored, by uid."""
        self._admit(count)
        groups: list[Group] = []
        together = getattr(self.rewards, "has_batch", False)
        while len(groups) < count:
            arrival: Group | BaseException = await self.unless_stopped(self._arrivals.get())
            if isinstance(arrival, BaseException):
                raise arrival
            if not together:
                self.journal.scored([arrival])
            groups.append(arrival)
            self.observer.progress("generate", len(groups), count, "prompts")
        groups.sort(key=lambda group: group.prompt.uid)
        if together:  # rewards that compare the groups of a generation batch speak when all are there
            groups = await self.unless_stopped(self.rewards.score_batch(groups))
            self.journal.scored(groups)
        self._scoring += self.clock.now() - self._completed_at
        return groups

    def cancel(self) -> None:
        """Give up what is still being generated."""
        for task in self._rollouts:
            task.cancel()

    # ---- dynamic sampling --------------------------------------------------------------------------------------------

    def _still_fresh(self, version: int) -> tuple[list[Group], list[tuple[Group, str]]]:
        """What was carried over, by uid: usable, or too far behind."""
        most = self.refill.max_age if self.refill else 0
        carried, self.carried = sorted(self.carried, key=lambda group: group.prompt.uid), []
        stale = [group for group in carried if group_age(group, version) > most]
        return [group for group in carried if group not in stale], [(group, STALE) for group in stale]

    def _exhausted(self, batches: int) -> bool:
        most = self.refill.max_num_gen_batches if self.refill else 1
        return 0 < most <= batches

    def _how_many(self, missing: int, generated: Sequence[Group], usable: Sequence[Group]) -> int:
        """Prompts of the next generation batch."""
        if self.refill is None:
            return missing
        if (fixed := self.refill.at_once(self.prompts)) is not None:
            return fixed
        rate = self.acceptance(len(generated) - _unscored(generated), len(_among(usable, generated)))
        return min(math.ceil(missing / rate), GREATEST_OVERSAMPLE * self.prompts)

    def acceptance(self, judged: int = 0, accepted: int = 0) -> float:
        """Running share of generated groups that could be used: of the last steps in the journal and of this one so
        far.

        (accepted + 1) / (judged + 1), so 1 before anything is known, and never 0. Groups without a score were not
        judged. It is a function
        of the journal alone: a resumed run draws as an unbroken one.
        """
        seen = 0
        for step in range(self.journal.step, 0, -1):
            record = self.journal.metrics(step)
            if record is None or "prompts_accepted" not in record or seen == REMEMBERED:
                break
            seen += record["prompts_generated"] > 0
            judged += int(record["prompts_generated"]) - int(record["prompts_unscored"])
            accepted += int(record["prompts_accepted"])
        return (accepted + 1) / (judged + 1)

    def _not_filled(
        self, usable: Sequence[Group], generated: Sequence[Group], dropped: Sequence[tuple[Group, str]], batches: int
    ) -> str:
        why = ", ".join(f"{count} {reason}" for reason, count in Counter(reason for _, reason in dropped).most_common())
        scores = [score for group in generated for score in group.scores if score.valid]
        mean = (
            f"mean reward {sum(score.value for score in scores) / len(scores):.3g}"
            if scores
            else errors_of(generated) or "no score"
        )
        blind = "" if any(score.correct is not None for score in scores) else "; no reward says which answers are right"
        return (
            f"step {self.journal.step + 1}: {batches} generation batches (max_num_gen_batches) gave {len(usable)} "
            f"of {self.prompts} usable "
            f"groups out of {len(generated)} generated ({why}; {mean}{blind}); they are in "
            f"rollouts/{self.journal.step + 1:06d}.parquet. "
            "Take questions of another difficulty or more completions a prompt in another run, or go on with "
            "--resume and a higher "
            "algorithm.dynamic_sampling.max_num_gen_batches or algorithm.dynamic_sampling.exhausted=partial"
        )

    # ---- generating --------------------------------------------------------------------------------------------------

    def _admit(self, count: int) -> None:
        """queued → generating."""
        prompts = self.source.next(count)
        self.journal.admit(prompts, size=len(self.source.rows), cursor_state=self.source.state())
        self.journal.generating(prompt.uid for prompt in prompts)
        task = asyncio.get_running_loop().create_task(self._roll_out(prompts))
        self._rollouts.add(task)
        task.add_done_callback(self._rollouts.discard)

    async def _roll_out(self, prompts: Sequence[Prompt]) -> None:
        """Generate, and score each group as soon as it is complete, beside those still generating."""
        try:
            greedy = replace(
                self.sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0
            )  # one more, if the advantage has it as baseline
            ways = [self.sampling] * self.completions + [greedy] * self.algorithm.needs_baseline
            wanted = len(ways)
            requests = [
                Request(prompt=p, sample=i, sampling=way, seed=self.seed) for p in prompts for i, way in enumerate(ways)
            ]
            found: dict[int, dict[int, Completion]] = {prompt.uid: {} for prompt in prompts}
            by_uid = {prompt.uid: prompt for prompt in prompts}
            scoring: list[asyncio.Task[None]] = []
            async for completion in self.engine.generate(requests):
                own = found[completion.prompt_uid]
                own[completion.sample] = completion
                if len(own) == wanted:
                    group = tuple(own[i] for i in range(wanted))
                    scoring.append(asyncio.create_task(self._score(by_uid[completion.prompt_uid], group)))
            self._completed_at = self.clock.now()
            if lost := [uid for uid, own in found.items() if len(own) < wanted]:
                raise RuntimeError(f"the engine ended without all completions of prompts {lost}")
            await asyncio.gather(*scoring)
        except Exception as error:  # wherever it came from, the loop must see it
            self._arrivals.put_nowait(error)

    async def _score(self, prompt: Prompt, completions: tuple[Completion, ...]) -> None:
        scores = await self.rewards.score(prompt, completions)
        baseline = scores[-1].value if self.algorithm.needs_baseline else None
        n = self.completions
        self._arrivals.put_nowait(
            Group(prompt=prompt, completions=completions[:n], scores=tuple(scores[:n]), baseline=baseline)
        )


def _among(usable: Sequence[Group], generated: Sequence[Group]) -> list[Group]:
    """The usable groups that are not carried over from before."""
    fresh = {group.prompt.uid for group in generated}
    return [group for group in usable if group.prompt.uid in fresh]


def _unscored(groups: Sequence[Group]) -> int:
    return sum(not any(score.valid for score in group.scores) for group in groups)


def errors_of(groups: Sequence[Group]) -> str:
    """The different errors of the scores that failed, three at most."""
    errors = list(dict.fromkeys(str(s.error) for group in groups for s in group.scores if not s.valid))
    return "; ".join(errors[:3]) + (f"; and {len(errors) - 3} others" if len(errors) > 3 else "")


def group_age(group: Group, version: int) -> int:
    """How many policy versions the oldest token of the group is behind; 0 for a group without tokens."""
    oldest = group.oldest_version
    return 0 if oldest is None else version - oldest
