"""The players, rewards and settings of a mix, whose sources may each have their own.

They choose by the source of a prompt, and are otherwise used like those of a task that is no mix.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.engine.protocol import Engine, InFlight, Request, Sampling
from proxima.reward.runner import RewardRunner
from proxima.rollout.episodes.played import Deliver, EpisodeCallback, EpisodePlayer, PartialPaths, sampled_turns
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.rollout.reward_checks import ReferenceAnswers
from proxima.task.mix import TaskSource, source_of
from proxima.task.protocol import Row, Rows

World = TypeVar("World")

ALSO_GREEDY = ("max_tokens", "stop")  # of a source's sampling, what applies to an evaluation too


def sampling_of(source: TaskSource, sampling: Sampling, *, evaluates: bool = False) -> Sampling:
    """How the completions of a source are sampled, in a run or an evaluation with this sampling. An evaluation keeps
    its own distribution, greedy by default, and takes only the length and the stop texts of the source.

    Raises:
        FieldError: a value is out of range.
    """
    own = source.sampling
    if evaluates:
        own = {name: value for name, value in own.items() if name in ALSO_GREEDY}
    return replace(sampling, **own)


def settings_of(source: TaskSource, episode: EpisodeSettings) -> EpisodeSettings:
    """The limits of the episodes of a source, in a run with these limits.

    Raises:
        FieldError: a value is out of range.
    """
    return replace(episode, **source.episode)


def sampling_by_source(
    sources: Sequence[TaskSource], sampling: Sampling, *, evaluates: bool = False
) -> Callable[[Prompt], Sampling] | None:
    """The sampling of a prompt by its source; None if all sources have that of the run."""
    samplings = {source.name: sampling_of(source, sampling, evaluates=evaluates) for source in sources}
    if set(samplings.values()) <= {sampling}:
        return None
    return partial(_of_prompt, sources, samplings)


def _of_prompt(sources: Sequence[TaskSource], values: Mapping[str, Any], prompt: Prompt) -> Any:
    return values[source_of(sources, prompt.metadata).name]


def groups_by_source(sources: Sequence[TaskSource], groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups of each source of a mix, by its name, without sources that have none; empty for one task."""
    if [source.name for source in sources] == [""]:
        return {}
    parts: dict[str, list[Group]] = {source.name: [] for source in sources}
    for group in groups:
        parts[source_of(sources, group.prompt.metadata).name].append(group)
    return {name: of_source for name, of_source in parts.items() if of_source}


def rows_by_source(sources: Sequence[TaskSource], answers: ReferenceAnswers) -> dict[str, ReferenceAnswers]:
    """The rows of each source among those of a mix, by the name of the source, without sources that have none."""
    numbers: dict[str, list[int]] = {}
    for number in range(answers.count):
        source = source_of(sources, answers.rows[number].metadata)
        numbers.setdefault(source.name, []).append(number)
    return {
        name: replace(answers, rows=PartOfRows(answers.rows, tuple(of_source)), count=len(of_source))
        for name, of_source in numbers.items()
    }


@dataclass(frozen=True)
class PartOfRows:
    """Some rows of a data set, by their numbers."""

    rows: Rows
    numbers: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Row:
        return self.rows[self.numbers[index]]


# ---- worlds ----------------------------------------------------------------------------------------------------------


def played_prompts(
    sources: Mapping[str, Sequence[TaskSource]], prompts: Mapping[str, Sequence[Prompt]]
) -> dict[str, tuple[TaskSource, list[Prompt]]]:
    """Each source that is played, with its prompts, by its `world_path`; sources that share a world are one.

    Args:
        sources, prompts: of the tasks, by their paths.
    """
    played: dict[str, tuple[TaskSource, list[Prompt]]] = {}
    for path, of_task in sources.items():
        for source in of_task:
            if source.played:
                _, asked = played.setdefault(source.world_path, (source, []))
                asked += [prompt for prompt in prompts.get(path, ()) if source.holds(prompt.metadata)]
    return played


def worlds_of(sources: Sequence[TaskSource], worlds: Mapping[str, World]) -> dict[str, World]:
    """Those of the worlds that play these sources, by `world_path`."""
    return {source.world_path: worlds[source.world_path] for source in sources if source.played}


# ---- rewards ---------------------------------------------------------------------------------------------------------


def rewards_by_source(
    sources: Sequence[TaskSource], specs: Sequence[Any], make: Callable[[Sequence[Any]], RewardRunner]
) -> "RewardRunner | SourceRewards":
    """The rewards of a task, whose sources may have their own; `specs` are those of the others."""
    if not any(source.reward for source in sources):
        return make(specs)
    runners: dict[str, RewardRunner] = {}
    for source in sources:
        if source.reward_path not in runners:
            runners[source.reward_path] = make(source.reward or specs)
    return SourceRewards(sources, runners)


class SourceRewards:
    """Scores the completions of each source by its own rewards; used like a `RewardRunner`.

    Args:
        sources: those of the task.
        runners: the rewards of the sources, by `reward_path`.
    """

    def __init__(self, sources: Sequence[TaskSource], runners: Mapping[str, RewardRunner]) -> None:
        self.sources = sources
        self.runners = runners
        labels: dict[str, None] = {}  # each once, in order
        for runner in runners.values():
            labels |= dict.fromkeys(runner.labels)
        self.labels = tuple(labels)

    @property
    def has_batch(self) -> bool:
        """See `RewardRunner.has_batch`; true if it is so for one source."""
        return any(runner.has_batch for runner in self.runners.values())

    @property
    def awaited(self) -> dict[str, list[int]]:
        """The prompts of the running calls, by the name of the reward."""
        waiting: dict[str, list[int]] = {label: [] for label in self.labels}
        for runner in self.runners.values():
            for label, uids in runner.awaited.items():
                waiting[label] += uids
        return waiting

    def of(self, prompt: Prompt) -> RewardRunner:
        """The rewards that score this prompt."""
        return self.runners[source_of(self.sources, prompt.metadata).reward_path]

    def start(self) -> None:
        """See `RewardRunner.start`."""
        for runner in self.runners.values():
            runner.start()

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """See `RewardRunner.score`."""
        return await self.of(prompt).score(prompt, completions)

    async def score_batch(self, groups: Sequence[Group]) -> list[Group]:
        """See `RewardRunner.score_batch`: a whole batch is that of one list of rewards."""
        parts: dict[int, list[Group]] = {}
        for group in groups:
            runner = self.of(group.prompt)
            parts.setdefault(id(runner), []).append(group)
        scored: dict[int, Group] = {}
        for of_runner in parts.values():
            for group in await self.of(of_runner[0].prompt).score_batch(of_runner):
                scored[group.prompt.uid] = group
        return [scored[group.prompt.uid] for group in groups]

    def close(self) -> None:
        """Stop the workers."""
        for runner in self.runners.values():
            runner.close()


# ---- players ---------------------------------------------------------------------------------------------------------


def player_by_source(
    sources: Sequence[TaskSource],
    engine: Engine,
    make: Callable[[str], EpisodePlayer | None],
    on_episode: EpisodeCallback | None = None,
) -> EpisodePlayer | None:
    """The player of a task; None if the engine answers all its prompts.

    Args:
        make: makes the player of a `world_path`; None: the engine answers.
        on_episode: gets each finished episode.
    """
    paths = dict.fromkeys(source.world_path for source in sources if source.played)
    made = {path: make(path) for path in paths}
    players = {path: player for path, player in made.items() if player is not None}
    if not players:
        return None
    if len(players) == 1 and all(source.world_path in players for source in sources):
        return next(iter(players.values()))
    return SourceEpisodes(engine, sources, players, on_episode)


class SourceEpisodes(EpisodePlayer):
    """Plays the episodes of each source by its own player; the engine answers the prompts of sources without one.

    Args:
        engine: answers them.
        sources: those of the task.
        players: by the `world_path` of the sources; their waiting times are added up in `times`.
        on_episode: gets each finished episode.
    """

    def __init__(
        self,
        engine: Engine,
        sources: Sequence[TaskSource],
        players: Mapping[str, EpisodePlayer],
        on_episode: EpisodeCallback | None,
    ) -> None:
        super().__init__(engine, on_episode)
        self.sources = sources
        self.players = players
        for player in players.values():
            player.times = self.times  # the engine is idle when no source awaits a turn

    def unfinished(self, running: Sequence[InFlight]) -> PartialPaths:
        paths: PartialPaths = []
        for player in self.players.values():
            paths += player.unfinished(running)
        return paths

    @asynccontextmanager
    async def at_work(self, requests: Sequence[Request], deliver: Deliver) -> AsyncIterator[None]:
        parts: dict[str, list[Request]] = {}
        answered: list[Request] = []  # by the engine
        for request in requests:
            source = source_of(self.sources, request.prompt.metadata)
            if source.world_path in self.players:
                parts.setdefault(source.world_path, []).append(request)
            else:
                answered.append(request)
        answers = asyncio.create_task(self._answer(answered, deliver))
        try:
            async with AsyncExitStack() as players:
                for path, of_player in parts.items():
                    await players.enter_async_context(self.players[path].at_work(of_player, deliver))
                yield
        finally:
            answers.cancel()
            await asyncio.gather(answers, return_exceptions=True)

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion, None]:
        keys = [(request.prompt.uid, request.sample) for request in requests]
        try:
            async with aclosing(super().generate(requests)) as stream:
                async for completion in stream:
                    self._forget([(completion.prompt_uid, completion.sample)])
                    yield completion
        finally:
            self._forget(keys)

    def _forget(self, keys: Sequence[tuple[int, int]]) -> None:
        """Remove episodes from those in progress."""
        for player in self.players.values():
            for key in keys:
                player.playing.pop(key, None)

    async def _answer(self, requests: Sequence[Request], deliver: Deliver) -> None:
        """Deliver the engine's answers to prompts without an environment."""
        if not requests:
            return
        try:
            async with aclosing(sampled_turns(self.engine, requests, self.times)) as stream:
                async for completion in stream:
                    deliver(completion)
        except BaseException as error:
            deliver(error)
