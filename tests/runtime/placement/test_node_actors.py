"""The actor of a rank, without Ray: it is a class like any other."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxima.runtime.placement.node_actors import RankHost
from tests.processes import is_running

FUNCTIONS = "tests.runtime.placement.rank_functions"


def running(folder: Path, act: str | int | None = None) -> tuple[RankHost, Iterator[Any]]:
    """An actor whose process has printed that it runs, and what it reports after that."""
    host, environment = RankHost(), {"RANK": "1", "PYTHONPATH": os.pathsep.join([*sys.path, os.getcwd()])}
    arguments = {"folder": str(folder), "acts": [{} if act is None else {"1": act}]}
    reports = host.run(f"{FUNCTIONS}:play", arguments, environment, os.getcwd())
    assert next(reports) == (1, ["waits 1"])
    return host, reports


ENDS = {  # how it ends → exit code, last line
    "by itself": (2, None),
    "an exception": (1, "RuntimeError: a bad day"),
    "a signal": (-signal.SIGKILL, None),
    "interrupt": (130, "writes a checkpoint"),
}
ACTS = {"by itself": 2, "an exception": "raise", "a signal": "kill"}


@pytest.mark.parametrize("how", ENDS)
def test_lines_and_exit_code(tmp_path: Path, how: str) -> None:
    host, reports = running(tmp_path, ACTS.get(how))
    if how not in ACTS:
        while not list(tmp_path.glob("1.*.json")):
            pass
        host.interrupt()
    *lines, exit_code = reports
    assert (exit_code, lines[-1][1][-1] if lines else None) == ENDS[how]
    host.interrupt()  # of a process that has ended


def test_its_last_lines_are_told_by_an_actor_that_was_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, reports = running(tmp_path)

    def select(*_: Any) -> list[Any]:
        """There is nothing to read, then the process ends, then the actor goes on."""
        monkeypatch.undo()
        while not list(tmp_path.glob("1.*.json")):
            pass
        host.interrupt()
        assert host.child is not None and host.child.process.wait() == 130
        return []

    monkeypatch.setattr("selectors.DefaultSelector.select", select)
    assert list(reports) == [(1, ["writes a checkpoint"]), 130]


def test_the_process_ends_with_its_actor(tmp_path: Path) -> None:
    host, reports = running(tmp_path)
    assert host.child is not None
    host.child.channel.close()
    assert list(reports) == [0] and not is_running(host.child.process.pid)


def test_lines_are_whole_and_the_last_may_be_a_part(tmp_path: Path) -> None:
    paths = {"PYTHONPATH": os.pathsep.join([*sys.path, os.getcwd()])}
    *reports, code = RankHost().run(f"{FUNCTIONS}:write", {"text": "x" * 300_000 + "\ny\rz\r\nlast"}, paths, "/nowhere")
    assert code == 0 and {stream for stream, _ in reports} == {2}
    assert [line for _, lines in reports for line in lines] == ["x" * 300_000, "y\rz", "last"]
