"""How many processes play, which of them gets an episode, and what becomes of one that may get no more."""

from dataclasses import dataclass, field

import pytest

from proxima.environment import job_processes
from proxima.environment.job_processes import JobProcesses


@dataclass(eq=False)
class Started:
    waiting: list[int] = field(default_factory=list)
    retired: bool = False
    ended: bool = False

    @property
    def load(self):
        return len(self.waiting)


@pytest.fixture
def started(monkeypatch):
    """The processes, which are none, that have been started."""
    made = []

    def start(command, name, grace):
        made.append(Started())
        return made[-1]

    monkeypatch.setattr(job_processes, "JobProcess", start)
    monkeypatch.setattr(job_processes, "usable_cores", lambda: 3)
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
    host = JobProcesses(["program"], workers)
    for number in range(episodes):
        host.process().waiting.append(number)
    assert [len(each.waiting) for each in started] == played


def test_one_that_is_retired_gets_no_episode_and_is_forgotten_at_its_end(started):
    host = JobProcesses(["program"], 1)
    first = host.process()
    first.retired = True
    second = host.process()
    assert second is not first and second is host.process()
    assert host._retired == [first]
    first.ended = True
    host.process()
    assert host._retired == [] and started == [first, second]
