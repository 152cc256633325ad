"""Stops completions that `prune` would drop whatever they are worth, while their group is generated; see `StopRule`."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from math import inf

from proxima.core.selection.stopping import StopRule, stops_in_time
from proxima.data import UserError
from proxima.data.flow import STOPPED, Completion, Prompt, Score, prompt_name
from proxima.engine.protocol import Engine

SECONDS_BETWEEN_LOOKS = 0.05  # at the tokens of the running completions, while a stop waits for one that is behind

ScoreCompletions = Callable[[Prompt, Sequence[Completion]], Awaitable[list[Score]]]


class WatchedGroup:
    """The group of a prompt while it is generated: scores each completion as it ends, and stops those that are not
    worth finishing.

    What is stopped depends on lengths and rewards only, see `stops_in_time`; where the engine or a reward is late, a
    completion has more tokens than it needed, or has ended by itself: what is too much is left out of the group.

    Args:
        prompt: the prompt.
        size: completions of the group, without the greedy one.
        greedy: its sample number; None: there is none.
        rule: decides what is stopped.
        engine: has `in_flight`, and ends completions.
        score: scores completions of a prompt.
    """

    def __init__(
        self, prompt: Prompt, size: int, greedy: int | None, rule: StopRule, engine: Engine, score: ScoreCompletions
    ) -> None:
        self.prompt = prompt
        self.size = size
        self.greedy = greedy
        self.rule = rule
        self.engine = engine
        self.score = score
        self._lengths: dict[int, int] = {}  # of completions that have ended by themselves
        self._scores: dict[int, Score] = {}
        self._rewards: dict[int, float | None] = {}  # within the rule's range; None without a valid score
        self._stopped: set[int] = set()  # those that the engine was asked to end
        self._tasks: list[asyncio.Task[None]] = []
        self._look: asyncio.Task[None] | None = None

    def ended(self, completion: Completion) -> None:
        """Take a completion from the engine."""
        if completion.finish_reason == "abort" and completion.sample in self._stopped:
            return
        self._lengths[completion.sample] = completion.generated
        self._tasks.append(asyncio.create_task(self._scored(completion)))

    async def finish(self, completions: Sequence[Completion]) -> tuple[list[Completion], list[Score]]:
        """The group once all its completions have ended: what is stopped has no score, and the tokens up to its stop.

        Raises:
            UserError: a reward is outside its range; any exception of the engine or the rewards.
        """
        try:
            await asyncio.gather(*self._tasks)
            if self._look is not None and self._look.done():
                self._look.result()
        finally:
            self.close()
        stopped = self._stops()
        ended: list[Completion] = []
        scores: list[Score] = []
        for completion in completions:
            length = stopped.get(completion.sample)
            if length is None and completion.sample not in self._scores:
                length = completion.generated  # the engine then lost tokens of another one, which ended sooner at last
            if length is None:
                ended.append(completion)
                scores.append(self._scores[completion.sample])
            else:
                ended.append(completion.stopped_after(length))
                scores.append(Score.failed(STOPPED))
        return ended, scores

    def close(self) -> None:
        """Stop watching."""
        for task in self._tasks:
            task.cancel()
        if self._look is not None:
            self._look.cancel()

    async def _scored(self, completion: Completion) -> None:
        """Score a completion, and begin to stop what is not worth finishing after it."""
        [score] = await self.score(self.prompt, [completion])
        reward = self.rule.in_range(score.value) if score.valid else None
        if score.valid and reward is None:
            raise UserError(
                f"{prompt_name(self.prompt.uid)}, sample {completion.sample}: a reward of {score.value:.9g} is outside "
                f"prune's reward_range=[{self.rule.low:g}, {self.rule.high:g}]",
                remedy="give the range that all rewards together can have, or set stop=false",
            )
        self._scores[completion.sample] = score
        self._rewards[completion.sample] = reward
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._stop_others())

    async def _stop_others(self) -> None:
        """Stop what is not worth finishing. While a shorter completion could still change that, look again."""
        while self._wanted():
            tokens = {
                flight.key[1]: len(flight.tokens)
                for flight in await self.engine.in_flight()
                if flight.key[0] == self.prompt.uid
            }
            certain = self._certain(tokens)
            if certain:
                self._stopped |= certain
                await self.engine.abort(self.prompt.uid, certain)
            else:
                await asyncio.sleep(SECONDS_BETWEEN_LOOKS)

    def _wanted(self) -> bool:
        """True if a running completion would be stopped if all running ones were longer than those that have ended."""
        return any(self._runs(sample) for sample in self._stops())

    def _certain(self, tokens: dict[int, int]) -> set[int]:
        """The running completions that are stopped whatever the others' lengths will be.

        Args:
            tokens: sample → tokens so far of those that run; those that have not begun are missing.
        """
        found: dict[int, int] = {}
        while True:
            waited_for = [
                sample
                for sample in self._samples()
                if sample not in self._scores and sample not in self._stopped and sample not in found
            ]
            # the rule is asked only after lengths at which none of these can still end
            reached = [self._lengths.get(sample, tokens.get(sample, 0)) for sample in waited_for]
            more = self._stops(before=min(reached, default=inf))
            if more.keys() <= found.keys():
                return {sample for sample in found if self._runs(sample)}
            found |= more

    def _stops(self, before: float = inf) -> dict[int, int]:
        """Sample → length at which it is stopped, from the scored completions that are shorter than `before`."""
        lengths = {sample: self._lengths[sample] for sample in self._rewards if self._lengths[sample] < before}
        return stops_in_time(self.rule, lengths, self._rewards, self.size, self.greedy)

    def _samples(self) -> range:
        if self.greedy is None:
            return range(self.size)
        return range(self.size + 1)

    def _runs(self, sample: int) -> bool:
        return sample not in self._lengths and sample not in self._stopped
