"""Whatever is started ends with the process that started it, and with the socket to it."""

import os
import signal
import subprocess
import sys

import pytest

from proxima.process.children import start_module
from proxima.process.exit_status import describe_exit
from proxima.process.program import LINE_BYTES, Program, ProgramFailed
from proxima.process.sandbox import Sandbox
from proxima.process.worker import ForkServer, KeptWorker
from tests.processes import assert_all_end, eventually, family, is_stopped

pytestmark = pytest.mark.slow  # processes
SLEEPS = [sys.executable, "-S", "-c", "import time\nwhile True: time.sleep(9)"]
LEAVES = [sys.executable, "-S", "-c", f"import subprocess\nsubprocess.Popen({SLEEPS}, start_new_session=True).wait()"]
MODULE = "proxima.environment.host_process"
STARTS = {
    "a module of ours": "kept = start_module('sleepy_module')",
    "a guarded command": f"kept = start_module('proxima.process.guardian', 600, *{SLEEPS}, flag='-I')",
    "a program": f"kept = Program({SLEEPS})",
    "a guarded program": f"kept = Program({LEAVES}, guarded=True)",
    "a worker": f"kept = ForkServer({MODULE!r}, 'test', OPTIONS); kept.fork()",
}
PARENT = """
import sys
from proxima.process.program import Program
from proxima.process.children import start_module
from proxima.process.worker import ForkServer
OPTIONS = {"warm_ups": [], "restricted": False, "memory_mb": 0}
%s
print("started", flush=True)
sys.stdin.read()
"""
# As the code of a reward, an environment or an agent may: stop its parent, its parent's parent, or both.
STOPPING = """
import os, signal, subprocess, sys, time
def parent(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
def stop(who):
    mine = parent(os.getpid())
    for pid in {"parent": [mine], "grandparent": [parent(mine)], "both": [parent(mine), mine]}[who]:
        os.kill(pid, signal.SIGSTOP)
class World:
    def reset(self, who):
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
        stop(who)
    def respond(self, message):
        return "again"
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stop("parent")
    while True:
        time.sleep(9)
"""
BELOW = {"a guarded command": 2, "a guarded program": 3, "a worker": 3}  # processes; else 1


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


@pytest.fixture
def stopping(tmp_path, monkeypatch):
    """The file of a module that stops what runs it."""
    (file := tmp_path / "stopping_world.py").write_text(STOPPING)
    monkeypatch.syspath_prepend(tmp_path)
    return file


WHO = ("parent", "grandparent", "both")
STOPPED_WORKER = """
from proxima.environment.hosts import Hosts
from proxima.environment.interface import EnvironmentSpec
hosts = Hosts(EnvironmentSpec(kind="stopping_world:World"), workers=1)
hosts._hosts[0].submit("open_environment", {"number": 0, "row": {"who": %r, "messages": []}, "seed": 0})
"""


@pytest.mark.parametrize("who", WHO)
def test_a_killed_parent_leaves_nothing_that_a_job_has_stopped(who, stopping):
    path = os.pathsep.join([str(stopping.parent), *filter(None, sys.path)])
    code = STOPPED_WORKER % who + "print('started', flush=True)\nimport sys\nsys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, **pipes) as parent:
        assert parent.stdout.readline() == b"started\n"
        eventually(lambda: len(family(parent.pid)) == 5)  # the fork server and its parent, the worker and its program
        everyone = family(parent.pid)
        if who != "parent":  # which is continued at once
            eventually(lambda: is_stopped(everyone[1]))
        parent.kill()
    assert_all_end(everyone)


@pytest.mark.parametrize("who", WHO)
def test_a_job_that_stops_its_parents_stops_no_other(who, stopping):
    server = ForkServer(MODULE, "test", {"warm_ups": [], "restricted": False, "memory_mb": 0})
    world = {"kind": "stopping_world:World", "arguments": {}, "tools": ()}
    worker = server.fork(("load_environment", world))
    everyone = family(server.child.process.pid)
    worker.run("open_environment", {"number": 0, "row": {"who": who, "messages": []}, "seed": 0}, 600)
    assert server.fork().run("drop", {"number": 1}, 600).value.keys() == {"seconds"}
    everyone = {*everyone, *family(server.child.process.pid)}
    server.close()
    assert_all_end(everyone)


def test_a_guarded_command_that_stops_its_guardian_ends(stopping):
    child = start_module("proxima.process.guardian", "0.2", sys.executable, stopping, flag="-I")
    eventually(lambda: is_stopped(child.process.pid))
    everyone = family(child.process.pid)
    assert len(everyone) == 2
    assert child.end(600) == 128 + signal.SIGKILL
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


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_guarded_program_is_killed_with_what_it_started(stubborn, stopping):
    """One whose child is in a session of its own, and one that has stopped its guardian."""
    program = Program([sys.executable, str(stopping)] if stubborn else LEAVES, guarded=True)
    pid = program._process.pid
    eventually(lambda: is_stopped(pid) if stubborn else len(family(pid)) == 3)
    everyone = family(pid)
    program.kill()
    with pytest.raises(ProgramFailed):
        program.read()
    assert_all_end(everyone)


@pytest.mark.parametrize("guarded", [False, True])
def test_a_program_says_its_last_words_however_many_it_has(guarded, monkeypatch):
    code = f"import sys\nsys.stderr.write('x' * {3 * LINE_BYTES} + '\\nlast words\\n')\nsys.exit(3)"
    with pytest.raises(ProgramFailed, match="^the tool ended with exit code 3: last words$"):
        Program([sys.executable, "-S", "-c", code], name="the tool", guarded=guarded).call("anything")
    dies = Program([sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 11)"], name="it", guarded=guarded)
    with pytest.raises(ProgramFailed, match="^it ended with SIGSEGV$"):
        dies.read()
    monkeypatch.setattr("proxima.process.program.EXIT_SECONDS", 0.1)
    quiet = "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(600)"
    program = Program([sys.executable, "-S", "-c", quiet], name="the tool", guarded=guarded)
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
    assert describe_exit(-40) == "signal 40"
    sandbox = Sandbox(kind="bubblewrap")
    assert [sandbox.exit_code(code) for code in (0, 128, 137, 168, 255)] == [0, 128, -9, -40, 255]
