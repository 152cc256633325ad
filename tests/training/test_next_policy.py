"""The next-policy cache: every log-prob is that of a replay under the version after the token's own, in flight or not;
each is written once, and none is used for a completion that was generated again."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from proxima.data.flow import Completion, Group
from proxima.data.pending import Pending
from proxima.data.trajectory import Trajectory
from proxima.engine.executor import Executor
from proxima.engine.protocol import Capabilities, Health, InFlight, WeightUpdate
from proxima.model.policy import Policy
from proxima.runtime.state.pending_files import read_next_policy, write_next_policy
from proxima.training.next_policy import NextLogProbs, NextPolicy, missing_metrics
from proxima.training.stack import TrainStack
from tests.engine.helpers import engine, prompt
from tests.model.rows import loaded
from tests.rollout.episodes.test_player import DONE, FORGETFUL, PROMPT, SHORT, World, player, said
from tests.rollout.episodes.test_player import requests as episode_requests

NAN = float("nan")
VERSIONS, SEEDS = 15, 3


def replayed(seed, items):
    """[T] log-probs of each completion under some weights."""
    stack = TrainStack(Policy(loaded("llama", seed), compute_dtype=torch.float32), tokens_per_micro_batch=300)
    return stack.log_prob(items)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "template"), [("engine", FORGETFUL), ("trainer", SHORT)], ids=["forks", "one path"])
def test_of_episodes_that_run_every_token_has_its_log_prob(source, template):
    """Turns of several versions, sampled while new weights come every two steps of the engine: every log-prob is that
    of a replay, and none is missing but those of the last version."""
    local_engine = engine(slots=8, seed=0)
    local_engine.scheduler.stop_tokens = frozenset(range(0, 260, 20))  # turns of some 20 tokens
    executor = Executor(local_engine)
    episodes = player(executor, World([*[said("go")] * 4, DONE]), template=template, context=900)
    made, playing, newest = {}, [], 0

    async def collect():
        async for completion in episodes.generate(episode_requests(6, max_tokens=200, temperature=0.8)):
            made[completion.key] = completion

    async def trainer(items):
        return replayed(newest % SEEDS, items)

    def held():
        return [(PROMPT, completion) for completion in made.values()]

    cache = NextPolicy(executor, held, trainer if source == "trainer" else None, playing=episodes.unfinished)
    if source == "engine":
        executor.register_pre_pause_hook(cache.before_pause)

    async def go():
        nonlocal newest
        collecting = asyncio.create_task(collect())
        for version in range(1, VERSIONS):
            for _ in range(2):
                await local_engine.compute.run(local_engine.scheduler.step)
                await asyncio.sleep(0)
            playing.append(len(episodes.playing))
            await cache.fill([], newest)
            await executor.pause()
            await executor.publish(WeightUpdate(version=version, module=loaded("llama", version % SEEDS).model))
            await executor.resume()
            newest = version
        await cache.fill([], newest)
        await executor.pause()
        await executor.resume()
        await collecting

    asyncio.run(asyncio.wait_for(go(), 600))
    assert sum(count > 0 for count in playing) > 3
    paths = [path for completion in made.values() for path in completion.paths]
    items = [Trajectory.of(path.initial_prompt or PROMPT, path, group=i, advantage=1.0) for i, path in enumerate(paths)]
    replays = [replayed(seed, items) for seed in range(SEEDS)]
    checked = 0
    filled = NextPolicy(executor, held, entries=cache.entries.values())
    for i, item in enumerate(asyncio.run(filled.fill(items, 99))):
        assert np.isnan(item.next_log_prob[item.policy_version == VERSIONS - 1]).all()
        for version in set(item.policy_version.tolist()) - {VERSIONS - 1}:
            places = (item.policy_version == version) & item.sampled
            expected = replays[(version + 1) % SEEDS][i][places]
            np.testing.assert_allclose(item.next_log_prob[places], expected, atol=2e-4)  # no NaN
            checked += int(places.sum())
    assert checked > 100 and any(len(set(item.policy_version[item.sampled].tolist())) > 2 for item in items)


class Recording:
    """Scores every token of a request as minus the number of its call, and says what it is told to."""

    capabilities = Capabilities(score=True, in_flight=True)

    def __init__(self, version=0):
        self.version, self.calls, self.flying = version, [], []

    async def health(self):
        return Health(ok=True, version=self.version)

    async def in_flight(self):
        return list(self.flying)

    async def score(self, asked):
        self.calls.append(
            [(request.prompt_tokens.tolist(), request.tokens.tolist(), request.temperature) for request in asked]
        )
        return [np.full(len(request.tokens), -float(len(self.calls)), np.float32) for request in asked]

    async def pause(self, mode="keep"): ...
    async def resume(self): ...


def completion(versions, uid=0, sample=0, tokens=None, **more):
    n = len(versions)
    given = {"tokens": range(10, 10 + n) if tokens is None else tokens, "policy_version": versions}
    given |= {"text": "", "sampled_log_prob": -0.5, "untruncated_log_prob": -0.5, "finish_reason": "stop"}
    return Completion(**{"prompt_uid": uid, "sample": sample, "temperature": 0.7} | given | more)


def run(cache, *versions):
    async def go():
        for version in versions:
            cache.engine.version = version
            await cache.before_pause()

    asyncio.run(go())


def column_of(cache, completion, version=9):
    item = Trajectory.of(prompt(completion.prompt_uid), completion, group=0, advantage=0.0)
    (filled,) = asyncio.run(cache.fill([item], version))
    return filled.next_log_prob.tolist()


def same(actual, expected):
    return np.array_equal(np.array(actual, np.float32), np.array(expected, np.float32), equal_nan=True)


def test_a_token_is_written_once_under_the_version_after_its_own():
    whole, held = completion([1, 1, 2, 2, 3]), []
    recording = Recording()
    cache = NextPolicy(recording, lambda: held)
    run(cache, 0)
    held.append((prompt(0), whole))
    run(cache, 2, 2, 3, 5)  # 3 is never found while 4 is the newest
    before = prompt(0).tokens.tolist()
    calls = [call for call in recording.calls if call]
    assert calls == [[(before, [10, 11], 0.7)], [([*before, 10, 11], [12, 13], 0.7)]]
    first, second = (-float(i + 1) for i, call in enumerate(recording.calls) if call)
    assert same(column_of(cache, whole), [first, first, second, second, NAN])
    assert cache.metrics() == {"next/written": 0, "next/missing_fraction": 0.2, "next/cached_fraction": 0.8}
    assert column_of(cache, whole, 4) and cache.metrics()["next/missing_fraction"] == 0  # one version old: not needed
    assert cache.metrics()["next/cached_fraction"] == 0.8


def test_a_completion_in_flight_continues_and_is_then_unconsumed():
    whole = completion([1, 1, 2, 2, 2])
    flying = InFlight.of(whole, prompt(0).tokens)
    recording, held = Recording(), []
    cache = NextPolicy(recording, lambda: held)
    recording.flying = [replace(flying, tokens=flying.tokens[:3], policy_version=flying.policy_version[:3])]
    run(cache, 2)
    recording.flying, held = [], held.append((prompt(0), whole)) or held
    run(cache, 3)
    assert same(column_of(cache, whole), [-1, -1, -2, -2, -2])


def test_of_an_episode_what_the_model_wrote_is_written_path_by_path():
    """An observation has the version of the turn before; nobody asks for it, nor for a turn that runs."""
    late = completion([2, 2, 2, 2], turn=1, sampled=[False, False, True, True])
    early = completion([1, 1, 1, 2, 2], sampled=[True, True, False, False, True], initial_prompt=prompt(0))
    flying = InFlight.of(completion([1], turn=1), np.int32([*prompt(0).tokens, 10, 11]))  # of nobody's episode
    recording, held = Recording(), [(prompt(1), replace(late, earlier=(early,), initial_prompt=prompt(0)))]
    cache = NextPolicy(recording, lambda: held, playing=lambda running: [])
    recording.flying = [flying]
    run(cache, 2, 3)
    before = prompt(0).tokens.tolist()
    assert recording.calls == [
        [(before, [10, 11], 0.7)],
        [([*before, 10, 11, 12, 13], [14], 0.7), ([*before, 10, 11], [12, 13], 0.7)],
    ]
    assert same(column_of(cache, early), [-1, -1, NAN, NAN, -2])
    assert cache.metrics()["next/missing_fraction"] == 0
    assert same(column_of(cache, late), [NAN, NAN, -2, -2])


@pytest.mark.parametrize(
    ("again", "of_the_first"),
    [
        ({"tokens": [10, 11, 99, 13], "versions": [1, 1, 1, 1]}, [NAN] * 4),
        ({"tokens": [10, 11, 12, 13], "versions": [2, 2, 2, 2]}, [NAN] * 4),  # after a crash, by later weights
        ({"tokens": [10, 11], "versions": [1, 1]}, [-2, -2, NAN, NAN]),  # the same tokens have the same numbers
    ],
)
def test_a_completion_generated_again_never_gets_the_firsts_numbers(again, of_the_first):
    first, second = completion([1, 1, 1, 1]), completion(again["versions"], tokens=again["tokens"])
    recording, held = Recording(), [(prompt(0), first)]
    cache = NextPolicy(recording, lambda: held)
    run(cache, 2)
    assert same(column_of(cache, first), [-1] * 4)
    assert same(column_of(cache, second), [NAN] * len(second.tokens))
    held[:] = [(prompt(0), second)]
    run(cache, max(again["versions"]) + 1)
    assert same(column_of(cache, second), [-2] * len(second.tokens))
    assert same(column_of(cache, first), of_the_first)


def test_the_first_publish_of_a_resumed_run_writes_nothing():
    """The engine holds version 0, whatever the weights are, until it is told of the others."""
    held = [(prompt(0), completion([0, 1, 6, 7]))]
    cache = NextPolicy(Recording(version=0), lambda: held)
    executor = Executor(cache.engine)
    executor.register_pre_pause_hook(cache.before_pause)
    asyncio.run(executor.pause())
    assert cache.entries == {}


def test_consumed_entries_are_forgotten_and_a_file_keeps_the_rest(tmp_path):
    held = [(prompt(uid), completion([1, 1, 2], uid=uid, sample=s)) for uid in (3, 1, 2) for s in (1, 0)]
    cache = NextPolicy(Recording(), lambda: held, file=("kept.parquet", write_next_policy))
    run(cache, 3)
    groups = [Group(prompt=prompt(1), completions=(), scores=())]
    pending = Pending(groups=tuple(groups), prompts=(prompt(3),))
    cache.files(pending)["kept.parquet"](tmp_path / "kept.parquet")
    kept = cache.forget(pending)
    assert read_next_policy(tmp_path / "kept.parquet") == kept
    assert {key[0] for key in cache.entries} == {1, 3} and cache.files(Pending()) == {}
    assert [entry.key for entry in kept] == [(1, 0, 0), (1, 1, 0)]
    cache.entries.clear()
    path = tmp_path / "next_policy.parquet"
    odd = NextLogProbs(
        uid=5, sample=0, turn=1, tokens=(1, 2), policy_version=(1, 2), log_prob=(NAN, np.float32(-1 / 3))
    )
    write_next_policy(path, [*kept, odd])
    assert read_next_policy(path) == [*kept, odd]
    assert read_next_policy(tmp_path / "none") == []
    again = NextPolicy(Recording(), lambda: held, entries=read_next_policy(path))
    assert same(column_of(again, held[2][1]), [NAN, NAN, -1])


def test_missing_counts_loss_tokens_alone():
    old = {"policy_version": (1, 1, 1, 4), "next_log_prob": (-1.0, NAN, NAN, NAN), "tokens": (1, 2, 3, 4)}
    item = Trajectory(group=0, prompt_tokens=(1,), **old)
    assert missing_metrics([item], 5) == {"next/missing_fraction": 0.5, "next/cached_fraction": 0.25}
    masked = replace(item, loss_mask=(True, True, False, False))
    assert missing_metrics([masked], 5) == {"next/missing_fraction": 0.5, "next/cached_fraction": 0.5}
    assert missing_metrics([], 5) == {"next/missing_fraction": 0.0, "next/cached_fraction": 0.0}
