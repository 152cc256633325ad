"""What starts for episodes starts at a bounded rate: programs, containers, environments of the run's own process."""

import asyncio
from contextlib import closing
from typing import Any

import pytest

from proxima.data import FieldError
from proxima.environment import ENVIRONMENTS
from proxima.environment.concurrent_hosts import ConcurrentHosts
from proxima.environment.episode_clock import EpisodeClock
from proxima.environment.interface import EnvironmentSpec
from proxima.environment.start_rate import EACH_CORE, StartRate
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.system.machine import usable_cores
from tests.environment.waiting_world import Waiting

ROW = {"messages": [{"role": "user", "content": "Count."}], "start": 1}


class Clock:
    """Stands still but for `at`."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def test_a_seconds_worth_starts_at_once_and_the_rest_evenly() -> None:
    rate = StartRate(4.0, Clock())
    assert [rate.reserve() for _ in range(7)] == [0.0, 0.0, 0.0, 0.0, 0.25, 0.5, 0.75]


def test_a_pause_gives_no_more_than_a_seconds_worth() -> None:
    clock = Clock()
    rate = StartRate(4.0, clock)
    for _ in range(6):
        rate.reserve()
    clock.at += 60.0
    assert [rate.reserve() for _ in range(5)] == [0.0, 0.0, 0.0, 0.0, 0.25]


@pytest.mark.parametrize("per_second", [0.1, 0.5, 1.0, 1.5])
def test_a_slow_rate_starts_one_at_a_time(per_second: float) -> None:
    rate = StartRate(per_second, Clock())
    assert [rate.reserve() for _ in range(3)] == pytest.approx([0.0, 1 / per_second, 2 / per_second])


def test_without_a_number_the_rate_is_by_cores() -> None:
    count = int(EACH_CORE * usable_cores())
    rate = StartRate(None, Clock())
    waits = [rate.reserve() for _ in range(count + 1)]
    assert waits[:-1] == [0.0] * count and waits[-1] == pytest.approx(1 / count)


class Counting(StartRate):
    """Every start waits for its turn until `let`."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.asked = 0
        self.let = asyncio.Event()

    async def turn(self) -> None:
        self.asked += 1
        await self.let.wait()


def test_a_place_waits_for_its_turn_and_that_is_no_time_of_its_own() -> None:
    async def run() -> dict[str, float]:
        now, starts, places = Clock(), Counting(), asyncio.Semaphore(3)
        clock = EpisodeClock(now=now, starts=starts)

        async def plays() -> None:
            async with clock.place_in(places):
                now.at += 2.0

        playing = asyncio.create_task(plays())
        while not starts.asked:
            await asyncio.sleep(0)
        now.at += 7.0
        starts.let.set()
        await playing
        assert places._value == 3
        return clock.seconds()

    assert asyncio.run(run()) == {"queued": 7.0, "own": 2.0, "policy": 0.0}


def test_one_that_leaves_while_it_waits_gives_its_place_back() -> None:
    async def run() -> int:
        starts, places = Counting(), asyncio.Semaphore(1)
        clock = EpisodeClock(starts=starts)

        async def plays() -> None:
            async with clock.place_in(places):
                raise AssertionError("it had no turn")

        playing = asyncio.create_task(plays())
        while not starts.asked:
            await asyncio.sleep(0)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        return places._value

    assert asyncio.run(run()) == 1


def test_environments_of_the_runs_process_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENTS._own, "waiting", "tests.environment.waiting_world:Waiting")
    for name, value in (("open", []), ("most", 0), ("waiting", None)):
        monkeypatch.setattr(Waiting, name, value)

    async def run(made: Any) -> tuple[int, int]:
        made._starts = starts = Counting()
        opening = [asyncio.create_task(made.open(ROW, 7)) for _ in range(2)]
        while starts.asked < 2:
            await asyncio.sleep(0)
        before = len(Waiting.open)
        opening.pop().cancel()
        starts.let.set()
        (instance,) = await asyncio.gather(*opening)
        await instance.end()
        return before, made._free[asyncio.get_running_loop()]._value

    with closing(ConcurrentHosts(EnvironmentSpec(kind="waiting"), 0.5)) as made:
        assert (made._starts._interval, made._starts._at_once) == (2.0, 0.0)
        assert asyncio.run(run(made)) == (0, made.places)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_starts_nothing_is_refused(rate: float) -> None:
    with pytest.raises(FieldError, match="starts_per_second=.* must be > 0 and finite; null: four a second for each"):
        EpisodeSettings(starts_per_second=rate)
