"""From prompts to a stream of scored groups: the rewards score finished groups while the engine generates others."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from proxima.core.selection.stopping import StopRule
from proxima.data import UserError
from proxima.data.flow import Completion, Group, Prompt, prompt_name
from proxima.engine.executor import Executor
from proxima.engine.protocol import Engine, Request, Sampling
from proxima.reward.runner import RewardRunner
from proxima.rollout.early_stop import WatchedGroup
from proxima.rollout.episodes.played import EpisodePlayer, with_group_prompt

if TYPE_CHECKING:
    from proxima.rollout.sources import SourceRewards


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """The settings for generating the group of a prompt.

    Args:
        sampling: settings of each completion.
        completions: completions per prompt.
        seed: seed of the random draws, together with the prompt's uid and the sample number.
        greedy_baseline: generate and score one additional greedy completion, whose reward becomes `Group.baseline`.
        sampling_by_prompt: returns the settings of a prompt; None: all prompts have `sampling`.
    """

    sampling: Sampling
    completions: int = 1
    seed: int = 0
    greedy_baseline: bool = False
    sampling_by_prompt: Callable[[Prompt], Sampling] | None = None

    @property
    def size(self) -> int:
        """The number of completions that the engine generates for a prompt."""
        return self.completions + self.greedy_baseline

    def requests(self, prompt: Prompt) -> list[Request]:
        """Return the engine requests of a prompt, by sample; the greedy one is the last."""
        if self.sampling_by_prompt is None:
            sampling = self.sampling
        else:
            sampling = self.sampling_by_prompt(prompt)
        settings = [sampling] * self.completions
        if self.greedy_baseline:
            settings.append(greedy(sampling))
        return [
            Request(prompt=prompt, sample=number, sampling=of_sample, seed=self.seed)
            for number, of_sample in enumerate(settings)
        ]


def greedy(sampling: Sampling) -> Sampling:
    """Return settings that take the most probable token at each position, up to the same length."""
    return replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


class RolloutListener:
    """Receives the events of prompts. The methods do nothing; override those of interest. They must be fast."""

    def enqueued(self, prompts: Sequence[Prompt]) -> None:
        """Prompts were drawn from the data and go to the engine next."""

    def completed(self, done: int, total: int) -> None:
        """`done` of `total` completions of the current batch are generated."""

    def generated(self, uid: int) -> None:
        """All completions of a prompt are generated; its rewards follow."""

    def rewarded(self, done: int, total: int) -> None:
        """The rewards of `done` of `total` groups of the current batch are known; whole-batch rewards may follow."""

    def scored(self, group: Group) -> None:
        """The scores of a group of a training batch are final."""

    def taken(self, uids: Iterable[int]) -> None:
        """A step has taken the groups of these prompts, or dropped them."""


def _require_stopping(engine: Engine) -> None:
    """Raise UserError unless the engine tells what it is generating, and ends a part of it."""
    able = engine.capabilities
    if not able.in_flight or not able.aborts_samples:
        kind = type(engine.engine if isinstance(engine, Executor) else engine).__name__
        needs = "needs an engine with the capabilities in_flight and aborts_samples"
        raise UserError(f"prune with stop=true {needs}, not {kind}", remedy="set stop=false")


class GroupGenerator:
    """Generates and scores groups.

    Args:
        engine, rewards: generate and score; the caller closes them.
        spec: settings for generating a group.
        now: a clock in seconds, for `scoring_seconds`.
        episodes: plays the prompts in their environment; None: the engine answers them.
        stop: stops the completions that `prune` would drop; None: all are finished.

    Raises:
        UserError: the engine does not tell what it is generating, which `stop` needs.

    With an `Executor`, a token of a newer version than the last published weights raises UserError. `scoring_seconds`
    is the time that the last batch waited for its rewards after its last completion.
    """

    def __init__(
        self,
        engine: Engine,
        rewards: "RewardRunner | SourceRewards",
        spec: GroupSpec,
        now: Callable[[], float],
        episodes: EpisodePlayer | None = None,
        stop: StopRule | None = None,
    ) -> None:
        if stop is not None:
            _require_stopping(engine)
        self.engine = engine
        self.rewards = rewards
        self.spec = spec
        self.now = now
        self.episodes = episodes
        self.stop = stop
        self._watched: dict[int, WatchedGroup] = {}  # by uid
        self.scoring_seconds = 0.0
        self._completed_at = 0.0

    async def generate(self, prompts: Sequence[Prompt], listener: RolloutListener) -> AsyncGenerator[Group, None]:
        """Yield each group as soon as its scores are final.

        Groups are yielded in the order of their completion. With a whole-batch reward they are yielded together, in the
        order of the prompts, once all are complete. Closing the generator abandons what is still being generated.

        Raises:
            RuntimeError: the engine ended without some of the completions; any exception of the engine.
        """
        arrivals: asyncio.Queue[Group | BaseException] = asyncio.Queue()
        rollout = asyncio.create_task(self._roll_out(prompts, listener, arrivals))
        groups: dict[int, Group] = {}
        try:
            while len(groups) < len(prompts):
                arrival = await arrivals.get()
                if isinstance(arrival, BaseException):
                    raise arrival
                groups[arrival.prompt.uid] = arrival
                listener.rewarded(len(groups), len(prompts))
                if not self.rewards.has_batch:
                    yield arrival
            if self.rewards.has_batch and prompts:
                in_order = [groups[prompt.uid] for prompt in prompts]
                for group in await self.rewards.score_batch(in_order):
                    yield group
            await rollout
            self.scoring_seconds = self.now() - self._completed_at
        finally:
            rollout.cancel()

    async def _roll_out(
        self, prompts: Sequence[Prompt], listener: RolloutListener, arrivals: "asyncio.Queue[Group | BaseException]"
    ) -> None:
        """Generate all completions, and score each group while others are still being generated."""
        by_uid = {prompt.uid: prompt for prompt in prompts}
        generated: dict[int, dict[int, Completion]] = {prompt.uid: {} for prompt in prompts}
        scoring: list[asyncio.Task[None]] = []
        done = 0
        total = len(prompts) * self.spec.size
        try:
            async with aclosing(self._completions(prompts)) as stream:
                async for completion in stream:
                    samples = generated[completion.prompt_uid]
                    samples[completion.sample] = completion
                    if len(samples) == self.spec.size:
                        listener.generated(completion.prompt_uid)
                        prompt = by_uid[completion.prompt_uid]
                        group = tuple(samples[i] for i in range(self.spec.size))
                        task = asyncio.create_task(self._score(prompt, group, arrivals))
                        scoring.append(task)
                    done += 1
                    listener.completed(done, total)
            self._completed_at = self.now()
            await asyncio.gather(*scoring)
        except BaseException as error:  # any error: the consumer must not wait forever
            arrivals.put_nowait(error)
        finally:
            for task in scoring:
                task.cancel()

    async def _score(
        self, prompt: Prompt, completions: tuple[Completion, ...], arrivals: "asyncio.Queue[Group | BaseException]"
    ) -> None:
        group = await self.score(prompt, completions)
        arrivals.put_nowait(group)

    async def complete(self, prompt: Prompt, received: dict[int, Completion]) -> tuple[Completion, ...]:
        """Generate the completions of one prompt, in a separate engine call.

        Args:
            received: receives each completion, by its sample, as soon as it arrives.

        Raises:
            RuntimeError: the engine ended without some of them; any exception of the engine.
        """
        async with aclosing(self._completions([prompt])) as stream:
            async for completion in stream:
                received[completion.sample] = completion
        return tuple(received[i] for i in range(self.spec.size))

    async def _completions(self, prompts: Sequence[Prompt]) -> AsyncGenerator[Completion, None]:
        """The completions of the prompts, in the order in which the engine finishes them.

        Raises:
            UserError: a token is of a version that the engine does not have.
            RuntimeError: the engine ended without some of them; any exception of the engine.
        """
        requests: list[Request] = []
        for prompt in prompts:
            requests += self.spec.requests(prompt)
        missing = {(request.prompt.uid, request.sample) for request in requests}
        if self.stop is not None:
            for prompt in prompts:
                self._watched[prompt.uid] = self._watch(prompt, self.stop)
        answering = self.episodes or self.engine
        try:
            async with aclosing(answering.generate(requests)) as stream:
                async for completion in stream:
                    completion.check_version(self._newest_version())
                    missing.discard((completion.prompt_uid, completion.sample))
                    if completion.prompt_uid in self._watched:
                        self._watched[completion.prompt_uid].ended(completion)
                    yield completion
        except BaseException:
            for prompt in prompts:
                watched = self._watched.pop(prompt.uid, None)
                if watched is not None:
                    watched.close()
            raise
        if missing:
            uids = sorted({uid for uid, _ in missing})
            names = ", ".join(map(prompt_name, uids))
            raise RuntimeError(f"the engine ended without all completions of {names}")

    def _watch(self, prompt: Prompt, rule: StopRule) -> WatchedGroup:
        greedy = None
        if self.spec.greedy_baseline:
            greedy = self.spec.completions
        return WatchedGroup(prompt, self.spec.completions, greedy, rule, self.engine, self.rewards.score)

    def _newest_version(self) -> int | None:
        """The version of the weights published last; None if the engine does not say."""
        if isinstance(self.engine, Executor):
            return self.engine.newest
        return None

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Group:
        """Score the group of a prompt, or of the prompt with which its environment replaced it, by all rewards except
        whole-batch rewards, which follow."""
        if self.episodes is not None:
            prompt, completions = with_group_prompt(prompt, completions)
        watched = self._watched.pop(prompt.uid, None)
        if watched is None:
            scores = await self.rewards.score(prompt, completions)
        else:
            completions, scores = await watched.finish(completions)
        baseline = None
        if self.spec.greedy_baseline:
            baseline = scores[-1].value
        n = self.spec.completions
        return Group(prompt=prompt, completions=tuple(completions[:n]), scores=tuple(scores[:n]), baseline=baseline)
