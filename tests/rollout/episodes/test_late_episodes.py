"""One of 17 episodes hangs: what becomes of the others, which play in the same processes."""

import asyncio
import sys
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from proxima.engine.protocol import Request, Sampling
from proxima.environment.agents import SCRIPT, ProcessAgents
from proxima.environment.job_processes import JobProcess
from proxima.rollout.episodes import agent_player
from proxima.rollout.episodes.agent_player import AgentEpisodes
from proxima.rollout.episodes.conversation import TurnTemplate
from proxima.rollout.episodes.settings import EpisodeSettings
from tests.rollout.episodes.test_agent_player import HERE, TOKENIZER, Scripted, prompt
from tests.rollout.episodes.test_episode_clock import MovedTime
from tests.uvicorn_ticks import quick_ticks

COUNT, LIMIT = 17, 10.0


class Patient(Scripted):
    """Answers the second turns once the episode that hangs is over. When all other episodes wait for that, it answers
    the first turn of the one that hangs; then the time moves, and that one is late."""

    def __init__(self, clock, mark):
        super().__init__(lambda context, request: "fine")
        self.clock, self.mark, self.waiting = clock, mark, 0
        self.all_wait, self.over = asyncio.Event(), asyncio.Event()

    async def generate(self, requests):
        (request,) = requests
        if request.prompt.uid == 0:
            await self.all_wait.wait()
        elif request.turn:
            self.waiting += 1
            if self.waiting == COUNT - 1:
                self.all_wait.set()
                while not self.mark.exists():
                    await asyncio.sleep(0.01)
                self.clock.ahead += 5 * LIMIT
            await self.over.wait()
        async for completion in super().generate(requests):
            yield completion


@quick_ticks()
def play(monkeypatch, mark, function, hangs, workers, grace):
    """The episodes in the order of their prompts, the first of which hangs once it has made the file `mark`, and the
    policy."""

    async def run():
        clock = MovedTime()
        monkeypatch.setattr(agent_player, "LoopTime", lambda: clock)
        policy = Patient(clock, mark)
        agents = ProcessAgents((sys.executable, str(SCRIPT), f"{HERE}:{function}"), workers, grace=grace)
        settings = EpisodeSettings(retries=0, call_seconds=LIMIT, seconds=LIMIT)
        episodes = AgentEpisodes(policy, agents, partial(TurnTemplate, TOKENIZER, {}), settings, 2000, "hermes")
        prompts = [
            replace(prompt(uid=uid), metadata={"hangs": "" if uid else hangs, "mark": str(mark)})
            for uid in range(COUNT)
        ]
        asked = [Request(prompt=each, sample=0, sampling=Sampling(max_tokens=50)) for each in prompts]
        played = {}
        try:
            async for completion in episodes.generate(asked):
                played[completion.prompt_uid] = completion.episode
                if completion.prompt_uid == 0:
                    policy.over.set()
        finally:
            agents.close()
        return [played[uid] for uid in range(COUNT)], policy

    return asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "hangs"),
    [
        ("hangs_between_turns", "await"),
        ("hangs_in_a_thread", "sleep"),  # ignores the end: its process gets no other episode
        ("hangs_in_a_thread", "compute"),
    ],
)
def test_a_late_episode_is_cancelled_alone(monkeypatch, tmp_path, function, hangs):
    received = JobProcess._received

    def at_once(process, message):
        """What does not end as soon as it is told has ignored that."""
        received(process, message)
        if "stopping" in message and hangs == "sleep":
            process._overdue(message["id"])

    monkeypatch.setattr(JobProcess, "_received", at_once)
    (late, *others), policy = play(monkeypatch, tmp_path / "mark", function, hangs, 1, grace=600.0)
    assert late.failure == f"its agent took longer than {LIMIT:g} s (episode.seconds)" and late.attempts == 1
    assert [(other.failure, other.attempts, other.reward) for other in others] == [("", 1, 1.0)] * (COUNT - 1)
    assert len(policy.requests) == 1 + 2 * (COUNT - 1)


@pytest.mark.slow
def test_an_event_loop_that_is_kept_busy_costs_what_shares_its_process(monkeypatch, tmp_path):
    (late, *others), policy = play(monkeypatch, tmp_path / "mark", "hangs_between_turns", "compute", 2, grace=0.2)
    assert late.failure == f"its agent took longer than {LIMIT:g} s (episode.seconds)" and late.attempts == 1
    assert [(other.failure, other.reward) for other in others] == [("", 1.0)] * (COUNT - 1)
    assert sorted(other.attempts for other in others) == [1] * 8 + [2] * 8
    turns = Counter(request.prompt.uid for request in policy.requests)
    assert [turns[uid] for uid, other in enumerate(others, 1) if other.attempts == 1] == [2] * 8
