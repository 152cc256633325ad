"""Python as a tool: output, errors, limits."""

import pytest

from proxima.data import FieldError
from proxima.environment.builtin import PythonCode
from proxima.environment.hosts import Hosts
from proxima.environment.interface import EnvironmentSpec
from tests.sandboxes import needs_bubblewrap

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("print(sum(range(10)))\nprint('é')", "45\né"),
        ("x = 1", "(it printed nothing)"),
        ("import sys; print(1); sys.exit(3)", "1"),
        ("if __name__ == '__main__': print(__name__)", "__main__"),
        ("import os; os.kill(os.getpid(), 9)", "PermissionError"),
        ("import os; os.abort()", "error: a signal ended it (6)"),
        ("1 +", "SyntaxError: invalid syntax"),
        ("print(1)\nraise KeyError('x')", "KeyError: 'x'"),
        ("x = [0] * 10**9", "MemoryError"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "PermissionError"),
        ("import subprocess; subprocess.run(['ls'])", "Error"),
        ("print(open('/no-such-folder/not-mine', 'w'))", "PermissionError: open is not allowed outside the folder"),
        ("print(input())", "EOFError"),
        ("print('\\ud800')", "\\ud800"),  # no character of UTF-8
    ],
)
def test_what_a_program_prints(code, shown):
    result = PythonCode(seconds=600, memory_mb=512).python(code)
    assert shown in result and len(result) <= 2100


def test_a_long_output_keeps_both_ends():
    result = PythonCode(seconds=600, characters=100).python("print('a' * 5_000_000); print('b' * 5_000_000)")
    assert result == "a" * 50 + "\n...\n" + "b" * 50


def test_an_endless_program_ends():
    for seconds in (1, 60):  # a busy machine may need more than a second to start it
        sleeps = "import time\nprint(1, flush=True)\nwhile True: time.sleep(9)"
        if (said := PythonCode(seconds=seconds).python(sleeps)).startswith("1"):
            break
    assert said == f"1\nerror: timed out after {seconds} s"
    busy = PythonCode(seconds=1).python("while True: pass")
    assert busy.startswith("error: ") and "\n" not in busy  # the clock, or its CPU time, ends it


@needs_bubblewrap
def test_workers_use_the_sandbox_that_the_inspection_found():
    hosts = Hosts(EnvironmentSpec(kind="python"))
    try:
        assert hosts.interface.settled == {"sandbox": "bubblewrap"} and hosts.interface.notes == ()
    finally:
        hosts.close()


def test_without_bubblewrap_it_is_refused_or_noted_before_the_run(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    hosts = Hosts(EnvironmentSpec(kind="python"))
    try:
        assert hosts.interface.settled == {"sandbox": "none"} and "bwrap" in hosts.interface.notes[0]
    finally:
        hosts.close()
    with pytest.raises(FieldError, match=r"environment.sandbox.*bwrap.*install bubblewrap"):
        Hosts(EnvironmentSpec(kind="python", arguments={"sandbox": "bubblewrap"}))
