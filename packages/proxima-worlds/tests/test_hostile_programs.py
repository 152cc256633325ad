"""Programs that run code of others, an environment's and an agent's, and write anything: what is no answer fails one
episode, or is one line, and nobody waits for what does not come."""

import asyncio
import json
import queue
import random
from collections import Counter

import pytest

from proxima.data import FieldError
from proxima.environment import job_processes
from proxima.environment.agents import AgentJob, ProcessAgents
from proxima.environment.hosts import EnvironmentFailure
from proxima.environment.protocol import RewardWithParts
from proxima.process.program import ProgramFailed
from proxima_worlds import foreign_environment
from proxima_worlds.foreign_agents import Verifiers
from tests.damaged import damaged

LONG = 600.0  # seconds after which somebody waits for ever


class Written:
    """A program that writes these messages; it ends after them. `answers` gives what it writes for a job."""

    def __init__(self, messages, answers=None):
        self.name, self.answers, self.messages = "its process", answers, queue.Queue()
        for message in messages:
            self.messages.put(message)
        if answers is None:
            self.messages.put(None)

    def write_line(self, line):
        message = json.loads(line)
        if "id" in message:
            for answer in self.answers(message["id"]):
                self.messages.put(answer)
            self.messages.put(None)

    def read(self):
        message = self.messages.get()
        if isinstance(message, dict):
            return message
        raise ProgramFailed("it ended" if message is None else "it wrote something that is not a message")

    def kill(self):
        self.messages.put(None)


# ---- agents ----------------------------------------------------------------------------------------------------------


def played(monkeypatch, answers, before=({"ready": True},)):
    """The reward that a program's answers to a job give."""
    monkeypatch.setattr(job_processes, "Program", lambda *_, **__: Written(before, answers))
    playing = ProcessAgents(("agent",), 1)

    async def play():
        async with asyncio.timeout(LONG):
            return await playing.play(AgentJob(row={"messages": []}, base_url="http://x/v1", api_key="k"))

    try:
        return asyncio.run(play())
    finally:
        playing.close()


GOOD = {"id": 0, "reward": 1.0}


@pytest.mark.parametrize("before", [({"ready": True},) * 2, ({"ready": []}, {"ready": None})])
def test_a_program_may_say_twice_that_it_is_ready(before, monkeypatch):
    assert played(monkeypatch, lambda number: [GOOD], before) == 1.0


@pytest.mark.parametrize("holder", [[0], {}, "0"])
def test_a_holder_that_is_no_number_ends_the_program(holder, monkeypatch):
    with pytest.raises(EnvironmentFailure, match="wrote something that is not an answer"):
        played(monkeypatch, lambda number: [{"held_by": holder}, GOOD])


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ({"reward": 2}, 2.0),
        ({"reward": {"a": 1}, "parts": {"b": 0.5}}, RewardWithParts(value={"a": 1.0}, parts={"b": 0.5})),
        ({"reward": None}, None),
        ({"reward": None, "parts": {"b": 0.5}}, None),
    ],
)
def test_rewards(answer, reward, monkeypatch):
    assert played(monkeypatch, lambda number: [{"id": number, **answer}]) == reward


@pytest.mark.parametrize(
    "answer",
    [
        *({"reward": value} for value in ("1", [], [1.0], {"a": None}, {"a": {"b": 1}}, 10**400)),
        *({"reward": 1.0, "parts": value} for value in (5, [1], {"b": "x"}, "x")),
    ],
)
def test_what_is_no_reward_fails_the_episode(answer, monkeypatch):
    with pytest.raises(EnvironmentFailure, match="its answer has no reward: ") as told:
        played(monkeypatch, lambda number: [{"id": number, **answer}])
    assert len(str(told.value)) < 300


def test_an_error_of_many_lines_is_one(monkeypatch):
    with pytest.raises(EnvironmentFailure) as told:
        played(monkeypatch, lambda number: [{"id": number, "error": "a\nb\n" * 10_000}])
    assert str(told.value).startswith("the agent failed: a b a b") and len(str(told.value)) < 1100


def answers_of(draw):
    kinds = [GOOD, GOOD | {"parts": {"x": 1.0}}, {"id": 0, "error": "bad", "reward": 0.5}, {"ready": True}]
    kinds += [{"held_by": 0}, {"id": 0, "stopping": True}]
    return [damaged(draw, draw.choice(kinds)), *([GOOD] if draw.random() < 0.5 else [])]


def fuzz_agents(monkeypatch, seeds):
    seen = Counter()
    for seed in seeds:
        draw = random.Random(seed)
        try:
            reward = played(monkeypatch, lambda number, draw=draw: answers_of(draw))
        except EnvironmentFailure as failure:
            assert "\n" not in str(failure) and len(str(failure)) < 6000
            seen["failed"] += 1
            continue
        seen["rewarded"] += 1
        value = reward.value if isinstance(reward, RewardWithParts) else reward
        values = value.values() if isinstance(value, dict) else [value]
        assert all(each is None or type(each) is float for each in values), reward
    return seen


# ---- environments of other libraries ---------------------------------------------------------------------------------

FACTS = {"version": "0.3", "sources": {"a.py": "0" * 64}, "rewards": ["r"], "seats": ["a"]}
ROW = {"messages": [{"role": "user", "content": "hi"}], "answer": "4", "environment_row": {"x": 1}}
MESSAGES = [{"facts": {"python": "python"}}, {"facts": FACTS}, {"row": ROW}, {"row": ROW}, {"end": True}]


def described(monkeypatch, messages):
    """What an environment gives whose process writes these messages."""
    foreign_environment._answered.cache_clear()
    monkeypatch.setattr(foreign_environment, "Program", lambda *_, **__: Written(messages))
    environment = Verifiers(name="env")
    return environment.inputs(), environment.roles, environment.rows("train", 0, 2)


def test_an_environment(monkeypatch):
    assert described(monkeypatch, MESSAGES) == ({"env: a.py": "0" * 64, "verifiers": "0.3"}, (), (ROW, ROW))


@pytest.mark.parametrize(
    ("at", "message", "said"),
    [
        (1, {"facts": 5}, "it wrote a number where an object was asked for"),
        (2, {"facts": FACTS | {"sources": {"a": 5}}}, "it wrote facts of other types"),
        (2, {"facts": FACTS | {"seats": [[]]}}, "it wrote facts of other types"),
        (2, {"row": None}, "it wrote null where an object was asked for"),
        (2, {"row": ROW | {"messages": "hi"}}, "it wrote a row without a list of messages"),
        (2, {"row": {"messages": []}}, "it wrote a row without a list of messages and an answer"),
        (4, {"row": ROW}, "it wrote more than the 2 rows that were asked for"),
        (1, {"problem": 5}, "it wrote a problem without a field, a value and a text"),
        (1, {"problem": ["name", 1, "is\nbad"]}, "name=1 is bad"),
    ],
)
def test_an_environment_that_is_none_is_one_line(at, message, said, monkeypatch):
    with pytest.raises(FieldError) as told:
        described(monkeypatch, [*MESSAGES[:at], message, *MESSAGES[at:]])
    assert said in str(told.value) and "\n" not in str(told.value)


def fuzz_environments(monkeypatch, seeds):
    seen = Counter()
    for seed in seeds:
        draw, messages = random.Random(seed), list(MESSAGES)
        at = draw.randrange(len(messages))
        messages[at] = damaged(draw, messages[at])
        try:
            _, _, rows = described(monkeypatch, messages)
        except FieldError as error:
            assert "\n" not in str(error) and len(str(error)) < 6000
            seen["refused"] += 1
            continue
        seen["read"] += 1
        assert all(isinstance(message, dict) for row in rows for message in row["messages"])
    return seen


@pytest.mark.slow
def test_a_few_damaged_answers(monkeypatch):
    assert min(fuzz_agents(monkeypatch, range(60)).values()) > 5
    assert min(fuzz_environments(monkeypatch, range(60)).values()) > 3


@pytest.mark.campaign("packages/proxima-worlds/tests/test_hostile_programs.py::test_a_few_damaged_answers")
def test_800_damaged_answers(monkeypatch):
    assert min(fuzz_agents(monkeypatch, range(1000, 1400)).values()) > 50
    assert min(fuzz_environments(monkeypatch, range(1000, 1400)).values()) > 20
