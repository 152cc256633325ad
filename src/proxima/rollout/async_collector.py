"""Groups that are generated and scored during training, within a bound on their age.

Prompts are enqueued in the order of the data whenever `InFlightLimit` has room for them, each with its own engine call.
Everything runs in the event loop: nothing changes between two awaits of the caller, so `state` and `pending`, read one
after the other, are consistent.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from proxima.data.flow import Completion, Group, Prompt
from proxima.data.pending import Pending
from proxima.rollout.collector import (
    STALE,
    BatchNotFilled,
    CollectedBatch,
    DrawingCollector,
    History,
    Refill,
    group_age,
)
from proxima.rollout.episodes.played import IdleTime
from proxima.rollout.generator import GroupGenerator, RolloutListener
from proxima.rollout.prompt_limits import InFlightLimit
from proxima.task.prompts import PromptSource


@dataclass(eq=False)
class EnqueuedPrompt:
    """A prompt between its draw from the data and its step.

    Args:
        stage: `queued`: the engine has no place for it yet, after a resume.
        received: its completions so far, by sample.
        group: the scored group; None before scoring.
        reason: why a selection rejects the group; empty if it doesn't.
    """

    prompt: Prompt
    stage: Literal["queued", "generating", "scoring", "unjudged", "accepted", "rejected"] = "queued"
    received: dict[int, Completion] = field(default_factory=dict)
    group: Group | None = None
    reason: str = ""

    @classmethod
    def restored(cls, group: Group, pending: Pending) -> "EnqueuedPrompt":
        """Restore the entry of a group as it was when `pending` was taken."""
        entry = cls(group.prompt, "accepted", group=group, reason=pending.rejected.get(group.prompt.uid, ""))
        if entry.uid in pending.rejected:
            entry.stage = "rejected"
        elif entry.uid in pending.unjudged:
            entry.stage = "unjudged"
        return entry

    @property
    def uid(self) -> int:
        """The uid of the prompt."""
        return self.prompt.uid

    @property
    def completions(self) -> Sequence[Completion]:
        """Its completions so far; after scoring, those that are trained on."""
        if self.group is None:
            return tuple(self.received.values())
        return self.group.completions

    @property
    def scored(self) -> Group:
        """The group; available only after scoring."""
        assert self.group is not None
        return self.group


class AsyncCollector(DrawingCollector):
    """Fills the batches of the steps from prompts that are generated continuously.

    `InFlightLimit.over_age` determines the groups that a step takes:

    - `wait`: the next ones in the order of the data; the step waits for the oldest. No group can be too old, and
      long completions are as likely to be trained on as short ones.
    - `drop`: the finished ones, oldest first, even if older ones are still generating. A group that is too old by then
      is dropped, and exactly one new prompt replaces it. Long completions become too old more often: the batches are
      biased towards short ones.
    - `train`: as `drop`, but groups that are too old are used.

    An engine call that raises ends the run, because an engine itself retries what it can. Whole-batch rewards compare
    the groups that a batch still lacks. Under dynamic sampling a group is judged as soon as the trainer's thread is
    free; a rejected one makes room for another, and after `max_num_gen_batches` batches of judged groups a step is
    exhausted.

    Args:
        generator: turns prompts into scored groups.
        source: gives prompts in order.
        limit: the bounds; its `prompts` are the groups of a full batch.
        refill: None takes all groups.
        listener: notified of the progress of each prompt.
        pending: restored from a checkpoint. Its prompts are generated first; the listener already knows them.
        finished: number of steps so far.
    """

    def __init__(
        self,
        generator: GroupGenerator,
        source: PromptSource,
        limit: InFlightLimit,
        *,
        refill: Refill | None = None,
        listener: RolloutListener,
        pending: Pending,
        finished: int = 0,
    ) -> None:
        self.generator: GroupGenerator = generator
        self.source = source
        self.limit = limit
        self.refill = refill
        self.listener = listener
        self._taken = finished  # steps; the one that trains now is taken, but not finished
        self._finished = finished
        entries = [EnqueuedPrompt.restored(group, pending) for group in pending.groups]
        entries += [EnqueuedPrompt(prompt) for prompt in pending.prompts]
        entries.sort(key=lambda entry: entry.uid)
        self._entries = {entry.uid: entry for entry in entries}  # in the order of the data
        self._tasks: set[asyncio.Task[None]] = set()
        self._judging = False  # a block of groups
        self._woken = False  # `_advance` will run
        self._abandoned = False
        self._changed = asyncio.Event()  # since `collect` looked last
        self._failure: BaseException | None = None  # ends the run
        self._stalls = 0  # of the step: how often `max_lag` began to keep a place of the engine empty
        self._stalled = False
        self._paused = False  # the engine samples no token
        if generator.episodes is None:
            self._idle = IdleTime(generator.now)
        else:  # the engine is idle, too, while all episodes wait for their environments
            self._idle = generator.episodes.times.idle
        self._step_began = 0.0
        self._idle_before = 0.0
        self._tokens = 0  # generated since the previous step's end

    # ---- called by the training loop ---------------------------------------------------------------------------------

    def pending(self) -> Pending:
        entries = self._entries.values()
        return Pending(
            groups=tuple(entry.group for entry in entries if entry.group is not None),
            prompts=tuple(entry.prompt for entry in entries if entry.group is None),
            rejected={entry.uid: entry.reason for entry in entries if entry.stage == "rejected"},
            unjudged=frozenset(entry.uid for entry in entries if entry.stage == "unjudged"),
        )

    def unconsumed(self) -> list[tuple[Prompt, Completion]]:
        held: list[tuple[Prompt, Completion]] = []
        for entry in self._entries.values():
            if entry.stage == "rejected":
                continue
            for completion in entry.completions:
                if completion.sample < self.generator.spec.completions:  # the greedy one is never trained on
                    held.append((entry.prompt, completion))
        return held

    async def collect(self, version: int, history: History = tuple) -> CollectedBatch:
        """Collect the groups of the next step; this call marks the previous step as finished.

        Raises:
            BatchNotFilled: `max_num_gen_batches` did not fill the batch, and `exhausted` is `stop`.
            Exception: from the engine, the rewards, the data or the journal.
        """
        self._finished = self._taken
        self._step_began = self.generator.now()
        self._idle_before = self._idle.seconds
        evicted: list[Group] = []
        while True:
            self._advance()
            stale = self._evict(version)
            if stale:
                evicted += stale
                self._advance()  # each eviction makes room for a prompt
            if self._failure is not None:
                raise self._failure
            ready = sum(entry.stage == "accepted" for entry in self._entries.values())
            self.listener.rewarded(min(ready, self.limit.prompts), self.limit.prompts)
            batch = self._next_batch()
            if batch is not None:
                accepted, rejected = batch
                return self._take(accepted, rejected, evicted, version)
            self._changed.clear()
            await self._changed.wait()

    def step_metrics(self, seconds: Mapping[str, float]) -> dict[str, float]:
        generated = self._tokens  # not the tokens of the step's groups: some were generated earlier
        self._tokens = 0
        idle = self._idle.seconds - self._idle_before  # read before `elapsed`, so that it never exceeds it
        elapsed = self.generator.now() - self._step_began
        return super().step_metrics(seconds) | {
            "idle/trainer": _share(seconds["generate"], seconds["step"]),
            "idle/engine": min(1.0, _share(idle, elapsed)),
            "tokens_per_second/generate": _share(generated, elapsed),
        }

    def engine_paused(self) -> None:
        """Record that the engine samples no token until `engine_resumed`."""
        self._paused = True
        self._track_idleness()

    def engine_resumed(self) -> None:
        """Record that the engine samples again."""
        self._paused = False
        self._track_idleness()

    def abandon(self) -> None:
        self._abandoned = True
        for task in self._tasks:
            task.cancel()

    # ---- a step takes its groups -------------------------------------------------------------------------------------

    def _next_batch(self) -> tuple[list[EnqueuedPrompt], list[EnqueuedPrompt]] | None:
        """The accepted and rejected groups of the step; None while it needs more."""
        accepted: list[EnqueuedPrompt] = []
        rejected: list[EnqueuedPrompt] = []
        for entry in self._entries.values():
            if entry.stage == "accepted":
                accepted.append(entry)
            elif entry.stage == "rejected":
                rejected.append(entry)
            elif self.limit.over_age == "wait":
                break
            if len(accepted) == self.limit.prompts:
                return accepted, rejected
        if self.refill is None:
            return None
        judged = accepted + rejected
        batches = len(judged) // self.limit.prompts
        groups = [entry.scored for entry in judged]
        given_up = self.refill.gives_up(batches, groups)
        exhausted = 0 < self.refill.sampling.max_num_gen_batches <= batches
        if not given_up and not exhausted:
            return None
        if given_up or self.refill.sampling.exhausted == "stop":
            raise BatchNotFilled(
                batches=batches,
                wanted=self.limit.prompts,
                usable=len(accepted),
                generated=groups,
                dropped=tuple((entry.scored, entry.reason) for entry in rejected),
            )
        return accepted, rejected

    def _take(
        self,
        accepted: Sequence[EnqueuedPrompt],
        rejected: Sequence[EnqueuedPrompt],
        evicted: Sequence[Group],
        version: int,
    ) -> CollectedBatch:
        gone = {entry.uid for entry in (*accepted, *rejected)}
        remaining = {uid: entry for uid, entry in self._entries.items() if uid not in gone}
        queue = sum(entry.stage == "accepted" for entry in remaining.values())

        groups = [entry.scored for entry in accepted]
        dropped = [(entry.scored, entry.reason) for entry in rejected]
        dropped += [(group, STALE) for group in evicted]
        # counted in the step that takes them, so that a step without newly finished groups has rewards, too
        generated = groups + [group for group, _ in dropped]
        batch = CollectedBatch(
            groups=tuple(groups),
            dropped=tuple(dropped),
            generated=tuple(sorted(generated, key=lambda group: group.prompt.uid)),
            version=version,
            accepted=len(accepted) + len(evicted),
            measured=self._measured(accepted, evicted, queue, version),
        )
        self._entries = remaining
        self._stalls = 0
        self._taken += 1
        self.listener.taken(batch.uids)
        return batch

    def _measured(
        self, accepted: Sequence[EnqueuedPrompt], evicted: Sequence[Group], queue: int, version: int
    ) -> dict[str, float]:
        completions: list[Completion] = []
        for entry in accepted:
            completions += entry.scored.completions
        columns = [completion.versions for completion in completions if completion.generated]
        lags = Counter[int]()  # tokens; one completion at a time, since a whole batch takes gigabytes
        for column in columns:
            tokens_by_lag = np.bincount(version - column).tolist()
            lags.update(dict(enumerate(tokens_by_lag)))
        mixed = sum(bool(column[0] != column[-1]) for column in columns)  # versions only grow
        return {
            "async/queue": queue,
            "async/running": self._count("generating"),
            "async/capacity_stalls": self._stalls,
            "async/evicted": len(evicted),
            "interrupted_fraction": _share(mixed, len(completions)),
            **{f"lag/{lag}": tokens / lags.total() for lag, tokens in sorted(lags.items()) if tokens},
        }

    def _evict(self, version: int) -> list[Group]:
        """Remove the groups that are too old to be used. Under `wait` this happens only if an earlier step was
        exhausted and took fewer groups than were enqueued for it."""
        if self.limit.over_age == "train":
            return []
        ready = [entry for entry in self._entries.values() if entry.stage == "accepted"]
        stale = [entry for entry in ready if group_age(entry.scored, version) > self.limit.max_lag]
        for entry in stale:
            del self._entries[entry.uid]
        return [entry.scored for entry in stale]

    # ---- between the steps -------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Judge and enqueue as much as possible; called after every event that may allow more."""
        self._woken = False
        if not self._abandoned and self._failure is None:
            try:
                self._judge_next()
                self._enqueue()
            except BaseException as error:
                self._failure = error
        self._changed.set()

    def _wake(self) -> None:
        """Schedule `_advance`, once for all simultaneous events."""
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._advance)

    def _enqueue(self) -> None:
        """Start the prompts restored by a resume, then new ones, while there is room."""
        places = self.limit.concurrent - self._count("generating")
        queued = [entry for entry in self._entries.values() if entry.stage == "queued"]
        for entry in queued[:places]:
            self._generate(entry)
        stages = Counter(entry.stage for entry in self._entries.values())
        counts = {
            "finished": self._finished,
            "accepted": self._taken * self.limit.prompts + stages["accepted"],
            "running": sum(stages[name] for name in ("queued", "generating", "scoring", "unjudged")),
            "generating": stages["generating"],
        }
        room = self.limit.capacity(**counts)
        if room:
            prompts = self.source.next(room)
            self.listener.enqueued(prompts)
            for prompt in prompts:
                entry = EnqueuedPrompt(prompt)
                self._entries[prompt.uid] = entry
                self._generate(entry)
        stalled = not room and self.limit.stalled(**counts)
        if stalled and not self._stalled:
            self._stalls += 1
        self._stalled = stalled
        self._track_idleness()

    def _generate(self, entry: EnqueuedPrompt) -> None:
        entry.stage = "generating"
        self._start(lambda: self._roll_out(entry))

    def _start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:  # not called if cancelled at once
        async def run() -> None:
            try:
                await work()
            except BaseException as error:  # any error: the step must not wait forever
                self._failure = self._failure or error
            self._wake()

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _roll_out(self, entry: EnqueuedPrompt) -> None:
        """Generate and score the group of a prompt."""
        completions = await self.generator.complete(entry.prompt, entry.received)
        entry.stage = "scoring"
        self._tokens += sum(completion.generated for completion in completions)
        self.listener.generated(entry.uid)
        self._wake()
        entry.group = await self.generator.score(entry.prompt, completions)
        entry.stage = "unjudged"

    def _judge_next(self) -> None:
        """Judge the next block, unless one is being judged."""
        if self._judging:
            return
        block = self._next_block()
        if not block:
            return
        if self.generator.rewards.has_batch or self.refill is not None:
            self._judging = True
            self._start(lambda: self._judge(block))
        else:
            for entry in block:
                self._settle(entry, entry.scored, None)

    def _next_block(self) -> list[EnqueuedPrompt]:
        """The groups to be judged together."""
        unjudged = [entry for entry in self._entries.values() if entry.stage == "unjudged"]
        if not self.generator.rewards.has_batch:
            return unjudged
        candidates = unjudged
        if self.limit.over_age == "wait":  # the next ones in the order of the data
            candidates = [entry for entry in self._entries.values() if entry.stage not in ("accepted", "rejected")]
        missing = self.limit.prompts - self._count("accepted") % self.limit.prompts
        block = candidates[:missing]
        if len(block) == missing and all(entry.stage == "unjudged" for entry in block):
            return block
        return []

    async def _judge(self, block: Sequence[EnqueuedPrompt]) -> None:
        groups = [entry.scored for entry in block]
        if self.generator.rewards.has_batch:
            groups = await self.generator.rewards.score_batch(groups)
        if self.refill:
            reasons = await self.refill.reject(groups)
        else:
            reasons = {}
        for entry, group in zip(block, groups, strict=True):
            self._settle(entry, group, reasons.get(entry.uid))
        self._judging = False

    def _settle(self, entry: EnqueuedPrompt, group: Group, reason: str | None) -> None:
        """Record the final scores of a group and whether it can be used."""
        entry.group = group
        entry.reason = reason or ""
        entry.stage = "accepted" if reason is None else "rejected"
        self.listener.scored(group)

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _count(self, *stages: str) -> int:
        return sum(entry.stage in stages for entry in self._entries.values())

    def _track_idleness(self) -> None:
        self._idle.update("collector", self._paused or not self._count("generating"))


def _share(part: float, whole: float) -> float:
    """`part` / `whole`; 0 if there is no whole."""
    return part / whole if whole else 0.0
