"""The engine's process while it still imports: it ends when the run does."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from proxima.process.start import START
from tests.engine.serve.programs import LONG
from tests.processes import eventually, is_running
from tests.warm import WarmPopen

pytestmark = pytest.mark.slow  # processes
SLOW = """
import os, time
from pathlib import Path
Path(os.environ["STARTED"]).write_text(str(os.getpid()))
{wait}
"""
SLEEP, SPIN = "time.sleep(600)", "while True: pass"


def slow_package(folder, name, wait):
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(SLOW.format(wait=wait))


@pytest.mark.parametrize("wait", [SLEEP, SPIN])
def test_a_closed_channel_ends_an_import(wait, tmp_path):
    slow_package(tmp_path, "slow_engine", wait)
    ours, theirs = socket.socketpair()
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "STARTED": str(tmp_path / "pid")}
    command = [sys.executable, "-P", str(START), "slow_engine", str(theirs.fileno()), "0"]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment) as process:
        theirs.close()
        eventually((tmp_path / "pid").exists)
        ours.send(b"a message that nobody has read yet")
        assert process.poll() is None
        ours.close()
        assert process.wait(LONG) == 0


def test_what_is_started_gets_its_arguments_and_the_messages(tmp_path):
    body = "import socket, sys\nchannel = socket.socket(fileno=int(sys.argv[1]))\n"
    (tmp_path / "echo_engine.py").write_text(body + "channel.send(channel.recv(9) + sys.argv[2].encode())\n")
    ours, theirs = socket.socketpair()
    ours.send(b"hello ")
    command = [sys.executable, "-P", str(START), "echo_engine", str(theirs.fileno()), "there"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run(command, pass_fds=[theirs.fileno()], env=environment, check=True, timeout=LONG)
    assert ours.recv(99) == b"hello there"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_trainer_that_is_killed_leaves_no_engine_that_imports(tmp_path):
    """The real supervisor, in a process that gets SIGKILL while the engine's process, which is not forked, imports
    torch."""
    slow_package(tmp_path, "torch", SLEEP)
    script = """
import sys
from proxima.engine.local_process import LocalProcess, ProcessEngine
from tests.model.rows import loaded
sys.path.insert(0, sys.argv[1])
engine = ProcessEngine(loaded("llama"), LocalProcess(dtype="float32"))
input()
"""
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": path, "STARTED": str(tmp_path / "pid")}
    with WarmPopen([sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, env=environment) as parent:
        pid = int(eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
        try:
            assert is_running(pid)
            parent.send_signal(signal.SIGKILL)
            parent.wait(LONG)
            eventually(lambda: not is_running(pid))
        finally:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
