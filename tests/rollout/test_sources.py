"""Prompts of a mix are played, scored and sampled as their source says."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from proxima.data import FieldError
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.engine.protocol import Request, Sampling
from proxima.rollout.episodes.played import EpisodePlayer
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.rollout.generator import GroupSpec
from proxima.rollout.sources import (
    SourceEpisodes,
    groups_by_source,
    rewards_by_source,
    sampling_by_source,
    sampling_of,
    settings_of,
)
from proxima.task.generated import Arithmetic
from proxima.task.mix import Mix, SourceEpisode, SourceSampling, WeightedTask, sources_of


def task_of(size=3, **fields):
    return Arithmetic(size=size, **fields)


MIX = Mix(
    tasks=(
        WeightedTask(name="plain", task=task_of()),
        WeightedTask(
            name="tool",
            task=task_of(environment="calculator"),
            reward=("own",),
            episode=SourceEpisode(turns=3),
            sampling=SourceSampling(temperature=0.5, max_tokens=7),
        ),
        WeightedTask(
            name="games",
            task=Mix(tasks=(WeightedTask(name="guess", task=task_of(environment="guess")),), column="game"),
            sampling=SourceSampling(stop=("!",)),
        ),
    )
)
SOURCES = sources_of(MIX)


def prompt(uid, **metadata):
    return Prompt(uid=uid, messages=(), tokens=np.array([1], np.int32), answer=None, metadata=metadata)


PLAIN, TOOL, GAME = (prompt(0, source="plain"), prompt(1, source="tool"), prompt(2, source="games", game="guess"))


def test_sources_have_paths_names_and_what_is_left_out_is_that_of_the_mix_around_them():
    assert [source.path for source in SOURCES] == [
        "task.tasks.0.task",
        "task.tasks.1.task",
        "task.tasks.2.task.tasks.0.task",
    ]
    assert [source.name for source in SOURCES] == ["plain", "tool", "games/guess"]
    assert [source.played for source in SOURCES] == [False, True, True]
    assert SOURCES[2].sampling == {"stop": ("!",)}
    shared = sources_of(Mix(tasks=MIX.tasks, environment="calculator"))
    assert [source.play_path for source in shared] == ["task", *(source.path for source in SOURCES[1:])]
    (alone,) = sources_of(task_of())
    assert (alone.path, alone.name, alone.holds({})) == ("task", "", True)


def test_settings_replace_those_of_the_run_within_their_bounds():
    run = Sampling(temperature=0.9, max_tokens=20)
    own = sampling_of(SOURCES[1], run)
    assert (own.temperature, own.max_tokens) == (0.5, 7)
    assert sampling_of(SOURCES[1], Sampling(temperature=0.0), evaluates=True) == Sampling(temperature=0.0, max_tokens=7)
    assert settings_of(SOURCES[1], EpisodeSettings(turns=9)).turns == 3
    (wrong,) = sources_of(Mix(tasks=(WeightedTask(name="a", task=task_of(), sampling=SourceSampling(top_p=2.0)),)))
    with pytest.raises(FieldError, match="top_p=2"):
        sampling_of(wrong, run)


def test_the_requests_of_a_prompt_have_the_sampling_of_its_source():
    run = Sampling(max_tokens=20)
    spec = GroupSpec(
        sampling=run, completions=2, greedy_baseline=True, sampling_by_prompt=sampling_by_source(SOURCES, run)
    )
    assert [request.sampling.max_tokens for request in spec.requests(PLAIN)] == [20] * 3
    assert [(request.sampling.temperature, request.sampling.max_tokens) for request in spec.requests(TOOL)] == [
        (0.5, 7),
        (0.5, 7),
        (0.0, 7),
    ]
    assert spec.requests(GAME)[0].sampling.stop == ("!",)
    assert sampling_by_source(SOURCES[:1], run) is None


class Runner:
    """Scores by the specs that it was made of."""

    has_batch, closed = True, False

    def __init__(self, specs):
        self.specs, self.labels, self.awaited = tuple(specs), tuple(specs), {spec: [] for spec in specs}

    async def score(self, prompt, completions):
        return [Score(value=1.0, parts=dict.fromkeys(self.specs, 1.0))] * len(completions)

    async def score_batch(self, groups):
        assert len({group.prompt.metadata["source"] == "tool" for group in groups}) == 1
        return list(groups)

    def close(self):
        self.closed = True


def test_each_source_is_scored_by_its_own_rewards_and_the_others_by_those_of_the_run():
    rewards = rewards_by_source(SOURCES, ["run"], Runner)
    assert rewards.labels == ("run", "own") and len(rewards.runners) == 2
    scored = [asyncio.run(rewards.score(each, [None]))[0].parts for each in (PLAIN, TOOL, GAME)]
    assert [list(parts) for parts in scored] == [["run"], ["own"], ["run"]]
    groups = [Group(prompt=each, completions=(), scores=()) for each in (GAME, TOOL, PLAIN)]
    assert asyncio.run(rewards.score_batch(groups)) == groups
    assert {name: len(part) for name, part in groups_by_source(SOURCES, groups).items()} == {
        "plain": 1,
        "tool": 1,
        "games/guess": 1,
    }
    rewards.close()
    assert all(runner.closed for runner in rewards.runners.values())
    assert isinstance(rewards_by_source(SOURCES[:1], ["run"], Runner), Runner)


def completion(request, text):
    return Completion.of_text(request.prompt.uid, request.sample, text, [1])


class Player(EpisodePlayer):
    """Delivers an episode of its name for each request, and records what it plays."""

    def __init__(self, name):
        super().__init__(None, None)
        self.name, self.asked = name, []

    def at_work(self, requests, deliver):
        player = self

        class Work:
            async def __aenter__(self):
                for request in requests:
                    player.asked.append(request.prompt.uid)
                    player.playing[request.prompt.uid, request.sample] = player.name
                    deliver(completion(request, player.name))

            async def __aexit__(self, *error):
                pass

        return Work()


def test_each_source_has_its_player_and_the_engine_answers_the_others():
    async def generate(requests):
        for request in requests:
            yield completion(request, "engine")

    players = {source.world_path: Player(source.name) for source in SOURCES[1:]}
    episodes = SourceEpisodes(SimpleNamespace(generate=generate), SOURCES, players, None)
    requests = [Request(prompt=each, sample=0, sampling=Sampling(), seed=1) for each in (PLAIN, TOOL, GAME)]

    async def played():
        return {each.prompt_uid: each.text async for each in episodes.generate(requests)}

    assert asyncio.run(played()) == {0: "engine", 1: "tool", 2: "games/guess"}
    assert all(player.playing == {} and player.times is episodes.times for player in players.values())
