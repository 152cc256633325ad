"""The engine's process while it still imports: it ends when the run does."""

import os
import socket
import subprocess
import sys

import pytest

from proxima.process.children import START
from tests.engine.serve.programs import LONG
from tests.processes import eventually

pytestmark = pytest.mark.slow  # processes
SLOW = """
import time
from pathlib import Path
Path(__file__).with_name("begun").touch()
"""


@pytest.mark.parametrize("wait", ["time.sleep(600)", "while True: pass"])
def test_a_closed_channel_ends_an_import(wait, tmp_path):
    (tmp_path / "slow_engine.py").write_text(SLOW + wait)
    ours, theirs = socket.socketpair()
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", str(START), "slow_engine", str(theirs.fileno()), "0"]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment) as process:
        theirs.close()
        eventually((tmp_path / "begun").exists)
        ours.send(b"a message that nobody has read yet")
        assert process.poll() is None
        ours.close()
        assert process.wait(LONG) == 0


@pytest.mark.slow
def test_what_is_started_gets_its_arguments_and_the_messages(tmp_path):
    body = "import socket, sys\nchannel = socket.socket(fileno=int(sys.argv[1]))\n"
    (tmp_path / "echo_engine.py").write_text(body + "channel.send(channel.recv(9) + sys.argv[2].encode())\n")
    ours, theirs = socket.socketpair()
    ours.send(b"hello ")
    command = [sys.executable, "-P", str(START), "echo_engine", str(theirs.fileno()), "there"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run(command, pass_fds=[theirs.fileno()], env=environment, check=True, timeout=LONG)
    assert ours.recv(99) == b"hello there"
