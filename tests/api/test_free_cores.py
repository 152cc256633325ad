"""Threads on a machine that other processes use too: the load is given, so that no test depends on the machine's."""

import os

import pytest
import torch

from proxima.api import free_cores, local_answers
from proxima.api.free_cores import SECONDS, choose_threads, core_times
from proxima.api.local_answers import local_engine
from tests.engine.helpers import saved, threads
from tests.model.rows import loaded

LINE = (
    "other processes keep the machine busy: 2.2 of 4 cores are free, so torch uses 2 of 4 threads, which can change "
    "the last bits of log-probs; OMP_NUM_THREADS=4 uses all"
)


class Machine:
    """Cores with the given shares of idle time, from one reading of the counters to the next; 0 ticks: a core of which
    nothing is counted."""

    def __init__(self, *idle: float, ticks: int = 100) -> None:
        self.idle, self.ticks, self.now, self.waited = idle, ticks, 0, []

    def read(self):
        self.now += 1
        return {
            i: (1000 + int(self.now * self.ticks * x), 5000 + self.now * self.ticks) for i, x in enumerate(self.idle)
        }

    def wait(self, seconds):
        self.waited.append(seconds)


@pytest.fixture(autouse=True)
def no_setting(monkeypatch):
    for name in free_cores.SETTINGS:
        monkeypatch.delenv(name, raising=False)


def chosen(machine, before=4, configured=0):
    """The line, and torch's threads afterwards."""
    with threads(before):
        return choose_threads(configured, machine.read, machine.wait), torch.get_num_threads()


@pytest.mark.parametrize(
    ("idle", "count"),
    [
        ((1, 1, 1, 1), 4),
        ((0.9, 0.9, 0.9, 0.85), 4),  # 3.55: half a core that others use takes none
        ((1, 1, 1, 0), 3),
        ((0.9, 0.8, 0.8, 0.9), 3),
        ((0, 0, 0, 0), 1),
        ((0.3, 0, 0, 0), 1),
        ((1,) * 16, 4),  # torch's own number is the most
        ((1, 1, 1, *(0,) * 13), 3),
    ],
)
def test_one_thread_for_each_free_core(idle, count):
    machine = Machine(*idle)
    line, now = chosen(machine)
    assert now == count and (line is None) == (count == 4) and machine.waited == [SECONDS]


def test_the_line_says_what_was_seen_and_what_to_do():
    assert chosen(Machine(1, 0.2, 0, 1)) == (LINE, 2)


def test_what_is_set_wins(monkeypatch):
    busy = Machine(0, 0, 0, 0)
    assert chosen(busy, configured=3) == (None, 3)
    assert chosen(busy, configured=64) == (None, 4)  # a run of a larger machine
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        with monkeypatch.context() as environment:
            environment.setenv(name, "4")
            assert chosen(busy) == (None, 4)
    assert chosen(busy, before=1) == (None, 1)
    assert busy.now == 0 and busy.waited == []  # nothing is measured


def test_where_nothing_is_known_nothing_changes():
    assert chosen(Machine()) == (None, 4)
    assert chosen(Machine(1, 1, 1, 1, ticks=0)) == (None, 4)


STAT = """cpu  300 0 60 900 40 0 0 0 0 0
cpu0 100 10 20 500 30 1 2 7 50 60
cpu1 200 0 40 400 10 0 0 0 0 0
cpu2 1 1 1 1 1 1 1 1 0 0
intr 7 0
ctxt 5
"""


def test_the_counters_of_the_kernel(tmp_path, monkeypatch):
    """user nice system idle iowait irq softirq steal; guest and guest_nice are in user and nice already."""
    (tmp_path / "stat").write_text(STAT)
    monkeypatch.setattr(free_cores, "STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert core_times() == {0: (530, 670), 1: (410, 650)}
    (tmp_path / "stat").write_text("cpu0 a b\n")
    assert core_times() == {}
    monkeypatch.setattr(free_cores, "STAT", tmp_path / "none")
    assert core_times() == {}
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(free_cores, "STAT", tmp_path / "stat")
    (tmp_path / "stat").write_text(STAT)
    assert core_times() == {}


@pytest.mark.skipif(not free_cores.STAT.is_file(), reason="needs /proc/stat")
def test_this_machine_has_counters():
    counts = core_times()
    assert counts and all(0 <= idle <= ticks for idle, ticks in counts.values())


@pytest.fixture
def asked(monkeypatch):
    """The thread counts that were asked for; the machine is busy."""
    counts = []
    monkeypatch.setattr(local_answers, "choose_threads", lambda configured: counts.append(configured) or "busy")
    return counts


def test_the_engine_of_generate_and_chat_asks_before_it_is_built(asked, tmp_path, monkeypatch):
    folder, said = saved(loaded("llama"), tmp_path), []
    local_engine(str(folder), "float32", "cpu", said.append)
    local_engine(str(folder), "float32", "auto", said.append, 3)
    if not torch.cuda.is_available():
        assert asked == [0, 3] and said == ["busy", "busy"]
    monkeypatch.setattr(local_answers, "load", lambda *_, **__: (_ for _ in ()).throw(KeyError("loads")))
    with pytest.raises(KeyError):
        local_engine(str(folder), "float32", "cuda", said.append)
    assert len(said) == 2 and 0 not in asked[2:]  # threads do not matter to a GPU
