"""How many processes play, which of them gets an episode, and what becomes of one that may get no more."""

from types import SimpleNamespace

import pytest

from proxima.environment import agents
from proxima.environment.agents import ProcessAgents


@pytest.fixture
def started(monkeypatch):
    """The processes, which are none, that have been started."""
    made = []

    def start(command, name, grace):
        made.append(SimpleNamespace(waiting=[], retired=False, ended=False))
        return made[-1]

    monkeypatch.setattr(agents, "_AgentProcess", start)
    monkeypatch.setattr(agents, "usable_cores", lambda: 3)
    return made


@pytest.mark.parametrize(
    ("workers", "episodes", "played"),
    [
        (0, 16, [16]),  # 16 for each, while there are cores
        (0, 17, [16, 1]),
        (0, 33, [16, 16, 1]),
        (0, 49, [17, 16, 16]),
        (2, 1, [1]),
        (2, 2, [1, 1]),
        (2, 5, [3, 2]),
    ],
)
def test_processes_are_as_many_as_the_episodes_need(started, workers, episodes, played):
    host = ProcessAgents(["program"], workers)
    for number in range(episodes):
        host._worker().waiting.append(number)
    assert [len(each.waiting) for each in started] == played


def test_one_that_is_retired_gets_no_episode_and_is_forgotten_at_its_end(started):
    host = ProcessAgents(["program"], 1)
    first = host._worker()
    first.retired = True
    second = host._worker()
    assert second is not first and second is host._worker()
    assert host._retired == [first]
    first.ended = True
    host._worker()
    assert host._retired == [] and started == [first, second]
