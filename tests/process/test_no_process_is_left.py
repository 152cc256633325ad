"""Whatever is started ends with the process that started it, and with the socket to it."""

import os
import signal
import subprocess
import sys

import pytest

from proxima.process.keeper import KeptWorker
from proxima.process.kill import describe_exit
from proxima.process.program import LINE_BYTES, Program, ProgramFailed
from proxima.process.start import start_module
from proxima.process.worker import ForkServer
from tests.processes import assert_all_end, eventually, family

pytestmark = pytest.mark.slow  # processes
SLEEPS = [sys.executable, "-S", "-c", "import time\nwhile True: time.sleep(9)"]
MODULE = "proxima.environment.host_process"
STARTS = {
    "a module of ours": "kept = start_module('sleepy_module')",
    "a guarded command": f"kept = start_module('proxima.process.guardian', 600, *{SLEEPS}, flag='-I')",
    "a program": f"kept = Program({SLEEPS})",
    "a worker": f"kept = ForkServer({MODULE!r}, 'test', OPTIONS); kept.fork()",
}
PARENT = """
import sys
from proxima.process.program import Program
from proxima.process.start import start_module
from proxima.process.worker import ForkServer
OPTIONS = {"warm_ups": [], "restricted": False, "memory_mb": 0}
%s
print("started", flush=True)
sys.stdin.read()
"""
BELOW = {"a guarded command": 2, "a worker": 3}  # processes; else 1


@pytest.mark.parametrize("kind", STARTS)
def test_a_killed_parent_leaves_nothing(kind, tmp_path):
    (tmp_path / "sleepy_module.py").write_text("import time\nwhile True: time.sleep(9)")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-c", PARENT % STARTS[kind]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, **pipes) as parent:
        assert parent.stdout.readline() == b"started\n"
        eventually(lambda: len(family(parent.pid)) > BELOW.get(kind, 1))
        everyone = family(parent.pid)
        parent.kill()
    assert_all_end(everyone)


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_guarded_command_is_stopped_with_what_it_started(stubborn):
    """One that ignores SIGTERM, whose child is in a session of its own."""
    code = "import signal, subprocess, sys, time\n"
    code += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if stubborn else ""
    code += f"subprocess.Popen({SLEEPS}, start_new_session=True)\nwhile True: time.sleep(9)"
    command = ("0.2" if stubborn else "600", sys.executable, "-c", code)
    child = start_module("proxima.process.guardian", *command, flag="-I")
    eventually(lambda: len(family(child.process.pid)) == 3)
    everyone = family(child.process.pid)
    child.channel.close()
    assert child.process.wait(600) == 128 + (signal.SIGKILL if stubborn else signal.SIGTERM)
    assert_all_end(everyone)


def test_a_program_says_its_last_words_however_many_it_has(monkeypatch):
    code = f"import sys\nsys.stderr.write('x' * {3 * LINE_BYTES} + '\\nlast words\\n')\nsys.exit(3)"
    with pytest.raises(ProgramFailed, match="^the tool ended with exit code 3: last words$"):
        Program([sys.executable, "-S", "-c", code], name="the tool").call("anything")
    monkeypatch.setattr("proxima.process.program.EXIT_SECONDS", 0.1)
    quiet = "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(600)"
    program = Program([sys.executable, "-S", "-c", quiet], name="the tool")
    with pytest.raises(ProgramFailed, match="^the tool closed its output$"):
        program.call("anything")
    program.kill()
    eventually(lambda: not program.alive)


def test_a_kept_worker_that_is_killed_is_replaced():
    server = ForkServer(MODULE, "test", {"warm_ups": [], "restricted": False, "memory_mb": 0})
    kept = KeptWorker(server.fork)
    try:
        assert kept.run("drop", {"number": 1}, 600).value.keys() == {"seconds"}
        os.kill(kept.worker.pid, signal.SIGKILL)
        died = kept.run("drop", {"number": 1}, 600, again=False)  # the worker may have taken the job before it died
        assert died.error and kept.deaths == 1 and kept.worker is None
        assert kept.run("drop", {"number": 1}, 600).value.keys() == {"seconds"} and kept.deaths == 1
    finally:
        server.close()
    with pytest.raises(RuntimeError, match="the test workers are closed"):
        server.fork()


def test_how_a_process_ended():
    assert describe_exit(3) == "exit code 3" and describe_exit(-11) == "SIGSEGV"
