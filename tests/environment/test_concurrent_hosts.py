"""Environments that wait for other programs are played many at once, as those of the workers are played."""

import asyncio
from contextlib import closing

import pytest

from proxima.data import FieldError
from proxima.data.episode import ToolCall
from proxima.environment import ENVIRONMENTS
from proxima.environment.concurrent_hosts import ConcurrentHosts
from proxima.environment.hosts import EnvironmentFailure
from proxima.environment.interface import EnvironmentSpec
from tests.environment.waiting_world import Waiting

ROW = {"messages": [{"role": "user", "content": "Count."}], "start": 1}


@pytest.fixture(autouse=True)
def kind(monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS._own, "waiting", "tests.environment.waiting_world:Waiting")
    for name, value in (("open", []), ("most", 0), ("waiting", None)):
        monkeypatch.setattr(Waiting, name, value)


def hosts(**arguments):
    return closing(ConcurrentHosts(EnvironmentSpec(kind="waiting", arguments=arguments)))


async def episode(made, *counts, start=1):
    """The opening, the answers, and the reward of an episode."""
    instance = await made.open({**ROW, "start": start}, 7)
    answers = await instance.call([ToolCall(name="add", arguments={"count": count}) for count in counts])
    return instance.opening, answers, await instance.end()


def test_an_episode_is_as_one_of_a_worker():
    with hosts() as made:
        opening, answers, reward = asyncio.run(episode(made, 2, 0, "x", "7", 5))
    assert opening[0]["content"] == "Count. Now." and reward == 10.0
    assert [[message["content"] for message in answer.messages] for answer in answers] == [
        ["3"], ["error: count must not be 0"], ["error: count must be integer, not \"x\""], ["10"], [],
    ]  # fmt: skip
    assert [(answer.reward, answer.done, answer.error) for answer in answers] == [
        (0.5, False, False), (0.0, False, True), (0.0, False, True), (0.5, True, False), (0.0, True, False),
    ]  # fmt: skip
    assert not Waiting.open


def test_as_many_play_at_once_as_there_are_places(monkeypatch):
    """Each waits for two others: one after another they would never end."""

    async def run(made):
        monkeypatch.setattr(Waiting, "waiting", asyncio.Barrier(3))
        return await asyncio.gather(*(episode(made, 1, 1) for _ in range(9)))

    with hosts() as made:
        assert [reward for _, _, reward in asyncio.run(run(made))] == [3.0] * 9
    assert Waiting.most == 3 and not Waiting.open


def test_one_that_fails_or_is_dropped_is_freed_and_gives_its_place_away():
    async def run(made):
        for _ in range(3):
            with pytest.raises(EnvironmentFailure, match="OSError: no room"):
                await episode(made, start=-1)
        for _ in range(3):
            dropped = await made.open(ROW, 0)
            dropped.drop()
            dropped.drop()
        return await episode(made, 1)

    with hosts(workers=1) as made:
        assert asyncio.run(run(made))[2] == 2.0
        asyncio.run(made.open(ROW, 0))
        assert len(Waiting.open) == 1
    assert not Waiting.open


def test_a_failure_says_how_long_its_call_took_without_its_waits():
    async def run(made):
        first = await made.open(ROW, 0)
        second = asyncio.create_task(episode(made, start=-1))
        await asyncio.sleep(0.5)
        first.drop()
        with pytest.raises(EnvironmentFailure, match="OSError: no room") as failed:
            await second
        return failed.value.own

    with hosts(workers=1) as made:
        assert 0.0 <= asyncio.run(run(made)) < 0.4


def test_one_whose_end_fails_gives_its_place_away(monkeypatch):
    def close(self):
        self.open.remove(self)
        raise OSError("it is gone already")

    monkeypatch.setattr(Waiting, "close", close)

    async def run(made):
        for _ in range(3):
            opened = await asyncio.wait_for(made.open(ROW, 0), 10)
            with pytest.raises(OSError, match="it is gone already"):
                opened.drop()

    with hosts(workers=1) as made:
        asyncio.run(run(made))


def test_nothing_opens_once_they_are_closed():
    with hosts() as made:
        pass
    with pytest.raises(EnvironmentFailure, match="the environments are closed"):
        asyncio.run(made.open(ROW, 0))
    assert not Waiting.open


def test_it_takes_no_other_tools_and_its_own_arguments():
    with pytest.raises(FieldError, match="environment='waiting' can't be made: .*unexpected keyword argument 'size'"):
        ConcurrentHosts(EnvironmentSpec(kind="waiting", arguments={"size": 3}))
    with pytest.raises(FieldError, match="tools=.* can't be given beside the environment 'waiting'"):
        ConcurrentHosts(EnvironmentSpec(kind="waiting", tools=("math:sqrt",)))
