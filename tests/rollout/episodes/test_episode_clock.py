"""What counts towards the limit of an episode, by a clock that a test moves, and in a campaign by the wall's."""

import asyncio
import sys
from contextlib import asynccontextmanager
from functools import partial

import pytest

from proxima.engine.protocol import Request, Sampling
from proxima.environment.agent_kinds import AgentSpec
from proxima.environment.agents import CommandAgents, LocalRunner
from proxima.environment.episode_clock import TICK, EpisodeClock, LoopTime
from proxima.environment.start_rate import StartRate
from proxima.rollout.episodes import agent_player
from proxima.rollout.episodes.agent_player import AgentEpisodes
from proxima.rollout.episodes.conversation import TurnTemplate
from proxima.rollout.episodes.settings import EpisodeSettings
from tests.manual_clock import ManualClock
from tests.rollout.episodes.test_agent_player import TOKENIZER, Scripted, prompt
from tests.uvicorn_ticks import quick_ticks

# Asks once, and takes so many seconds more. It starts quickly, as hundreds do.
PROGRAM = r"""
import os, socket, sys, time
host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
body = '{"messages": [{"role": "user", "content": "begin"}]}'
lines = [
    "POST /v1/chat/completions HTTP/1.1",
    f"Host: {host}:{port}",
    "Authorization: Bearer " + os.environ["OPENAI_API_KEY"],
    f"Content-Length: {len(body)}",
    "Connection: close",
]
asks = socket.create_connection((host, int(port)))
asks.sendall("\r\n".join([*lines, "", body]).encode())
assert b" 200 " in asks.recv(100)
time.sleep(float(sys.argv[1]))
print(1)
"""


def spec(seconds):
    return AgentSpec(command=(sys.executable, "-I", "-S", "-c", PROGRAM, str(seconds)))


class MovedTime:
    """The time of the running event loop, which a test moves forward."""

    def __init__(self):
        self.ahead = 0.0
        loop = asyncio.get_running_loop()
        now = loop.time
        loop.time = lambda: now() + self.ahead
        self.stop = lambda: None

    def __call__(self):
        return asyncio.get_running_loop().time()


class Slow(LocalRunner):
    """Every program takes four seconds more of its own."""

    time: MovedTime

    @asynccontextmanager
    async def running(self, job):
        async with super().running(job) as process:
            yield process
            self.time.ahead += 4.0


@quick_ticks()
def play(agents, policy, count, limit, moves=None, rate=None):
    """`moves` gets the clock, if it is the test's."""

    async def run():
        if moves:
            clock = MovedTime()
            moves(clock)
            patched.setattr(agent_player, "LoopTime", lambda: clock)
        settings = EpisodeSettings(retries=0, call_seconds=limit, seconds=limit, starts_per_second=rate)
        template = partial(TurnTemplate, TOKENIZER, {})
        episodes = AgentEpisodes(policy, agents, template, settings, 2000, "hermes")
        asked = [Request(prompt=prompt(uid=uid), sample=0, sampling=Sampling(max_tokens=50)) for uid in range(count)]
        try:
            played = [completion async for completion in episodes.generate(asked)]
        finally:
            agents.close()
        return played, episodes.times.taken()

    with pytest.MonkeyPatch.context() as patched:
        return asyncio.run(run())


@pytest.mark.slow
def test_what_waits_for_us_is_not_late():
    """Six programs of four seconds, one after the other, which wait a minute for the policy; the limit is six."""

    def says(context, request):
        policy.time.ahead += 60.0
        return "fine"

    policy, runner = Scripted(says), Slow(spec(0).command)

    def moves(clock):
        policy.time = runner.time = clock

    played, times = play(CommandAgents(runner, 1), policy, 6, 6.0, moves)
    assert [completion.episode.failure for completion in played] == [""] * 6
    spent = [completion.episode.seconds for completion in played]
    assert all(4 <= one["own"] < 6 and 60 <= one["policy"] < 64 for one in spent)
    assert sorted(one["queued"] // 64 for one in spent) == [0, 1, 2, 3, 4, 5]
    assert times["time/queued"] == pytest.approx(sum(one["queued"] for one in spent), abs=0.01)


@pytest.mark.campaign("tests/rollout/episodes/test_episode_clock.py::test_what_waits_for_us_is_not_late")
def test_hundreds_of_programs_have_their_own_time_each():
    played, _ = play(spec(4).build(), Scripted(lambda context, request: "fine"), 512, 6.0)
    assert [completion.episode.reward for completion in played] == [1.0] * 512


@pytest.mark.slow
def test_programs_start_at_the_rate_of_the_recipe(monkeypatch):
    turns = []

    async def turn(rate):
        turns.append(rate._interval)

    monkeypatch.setattr(StartRate, "turn", turn)
    played, _ = play(spec(0).build(), Scripted(lambda context, request: "fine"), 2, 60.0, rate=0.5)
    assert [completion.episode.failure for completion in played] == [""] * 2
    assert turns == [2.0, 2.0]


def test_waits_at_once_count_once():
    async def run():
        now = ManualClock()
        clock = EpisodeClock(now=now.now)
        with clock.queued():
            now.advance(5)
        now.advance(1)
        with clock.answering():
            now.advance(10)
            with clock.answering():
                now.advance(10)
        now.advance(2)
        return clock.seconds()

    spent = asyncio.run(run())
    assert spent == {"queued": 5.0, "own": 3.0, "policy": 20.0}


def test_what_holds_up_the_run_is_not_counted():
    """The loop is held up for ten seconds, once before a beat and once before it is asked."""

    async def run():
        moved = MovedTime()
        times = LoopTime()
        began = times()
        moved.ahead += 10.0
        await asyncio.sleep(TICK)
        moved.ahead += 10.0
        times.stop()
        return times() - began

    assert asyncio.run(run()) < 5
