"""The line of `make test`."""

import io
from types import SimpleNamespace

import pytest

from tests.progress import Progress, command
from tests.terminal import Terminal


def reported(test: str, outcome: str, when: str = "call") -> SimpleNamespace:
    kinds = {kind: outcome == kind for kind in ("passed", "failed", "skipped")}
    return SimpleNamespace(nodeid=test, outcome=outcome, when=when, **kinds)


def played(stream: io.StringIO) -> list[tuple[str, str, str]]:
    """Twenty tests: the fourth fails, the fifth is skipped, the sixth has no fixture."""
    progress, statuses = Progress(stream), []
    progress.pytest_xdist_node_collection_finished([*map(str, range(20))])
    for i in range(20):
        reports = [reported(f"t::a[{i}]", "passed", when) for when in ("setup", "call", "teardown")]
        if i in (3, 4):
            reports[1] = reported(f"t::a[{i}]", "failed" if i == 3 else "skipped")
        if i == 5:
            reports[:2] = [reported("t::a[5]", "failed", "setup")]
        for report in reports:
            statuses.append(progress.pytest_report_teststatus(report))
            progress.pytest_runtest_logreport(report)
    return statuses


def test_a_file_gets_a_line_for_each_tenth_and_each_failure_at_once():
    stream = io.StringIO()
    statuses = played(stream)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 12 and lines[-1].endswith("20 of 20 tests, 2 failed, 1 skipped")
    assert lines[1] == f"FAILED (call) {command('t::a[3]')}" and "FAILED (setup)" in lines[3]
    counted = [status[0] for status in statuses]
    assert [counted.count(kind) for kind in ("passed", "failed", "skipped", "error")] == [17, 1, 1, 1]


def test_on_a_terminal_one_line_moves(monkeypatch):
    monkeypatch.setattr("tests.progress.EVERY", 0.0)
    stream = Terminal()
    played(stream)
    assert stream.getvalue().count("\n") == 2  # of the failures
    assert stream.getvalue().endswith("\r\x1b[K0:00 20 of 20 tests, 2 failed, 1 skipped")


@pytest.mark.parametrize("test", ["a.py::b", "a.py::b[c d-{'x': 1}]"])
def test_a_command_can_be_pasted(test):
    import shlex

    assert shlex.split(command(test))[-3:] == ["-m", "pytest", test]
