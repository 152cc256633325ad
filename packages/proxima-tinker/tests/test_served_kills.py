"""A server that is killed: every client goes on, nothing is done twice, and the weights are those of an unbroken
run."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import tinker

from tests.engine.helpers import threads
from tests.ports import kept_port
from tests.warm import WarmPopen

from .conftest import running
from .data_of_clients import program, same, weights
from .plain_client import Client

HERE = "packages/proxima-tinker/tests/test_served_kills.py"


class Killed:
    """A server in a process of its own, which is killed and started again on the same port."""

    def __init__(self, folder, model):
        self.folder, self.model, self.port = folder, model, kept_port()
        self.lines = []
        self.start()

    def start(self):
        words = ["-m", "proxima.cli.main", "serve-training", str(self.model), "--name", "tests/tiny"]
        words += ["--folder", str(self.folder), "--port", str(self.port), "--dtype", "float32"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = WarmPopen([sys.executable, *words], **pipes, env=os.environ | {"OMP_NUM_THREADS": "1"})
        self.lines.append(self.process.stdout.readline())
        assert "Ctrl-C stops it" in self.lines[-1], self.process.stderr.read()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"


def check(tmp_path, tiny_model, kills, steps):
    """A job has the same losses and the same state whether its server is killed so many times or not."""
    model, done = tiny_model("llama"), []
    with threads(1), running(tmp_path / "whole", model, tokens=4096) as served:
        whole, path = program(served.client(), seed=7, steps=steps)
        expected = weights(tmp_path / "whole", path)
    server = Killed(tmp_path / "broken", model)
    client = tinker.ServiceClient(base_url=server.url)
    thread = threading.Thread(target=lambda: done.append(program(client, seed=7, steps=steps)))
    thread.start()
    draw = random.Random(0)
    for _ in range(kills):
        time.sleep(draw.uniform(0.02, 0.6))
        assert thread.is_alive(), "the client ended before the last kill"
        server.kill()
        server.start()
    thread.join(600)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    ((broken, path),) = done
    state = weights(tmp_path / "broken", path)
    assert broken == whole and same(state, expected)
    assert {int(value) for name, value in state.items() if name.startswith("step.")} == {steps}


@pytest.mark.slow
def test_a_killed_server_goes_on_where_it_was(tmp_path, tiny_model):
    check(tmp_path, tiny_model, kills=2, steps=6)


@pytest.mark.campaign(f"{HERE}::test_a_killed_server_goes_on_where_it_was", minutes=2)
def test_twenty_kills(tmp_path, tiny_model):
    check(tmp_path, tiny_model, kills=20, steps=100)


@pytest.mark.slow
def test_a_signal_while_requests_run_ends_the_server_and_loses_none(tmp_path, tiny_model):
    server = Killed(tmp_path, tiny_model("llama"))
    client = Client(server)
    accepted = client.begin_long_pass()
    for _ in range(20):
        client.post("asample", client.sample_body({"max_tokens": None, "stop": []})).raise_for_status()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    server.start()
    assert "1 models of earlier" in server.lines[-1]  # the request runs again, unless it had ended before the signal
    assert client.answer(accepted).headers["content-type"] == "application/x-protobuf"
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0 and server.process.stderr.read() == ""


def test_a_signal_while_passes_of_several_models_wait_for_their_turns(tmp_path, tiny_model):
    """Each has done a part of its pass, whose gradients torch holds."""
    server = Killed(tmp_path, tiny_model("llama"))
    clients = [Client(server) for _ in range(4)]
    accepted = [client.begin_long_pass(examples=400) for client in clients]
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0 and server.process.stderr.read() == ""
    server.start()
    assert "4 models of earlier; 4 requests run again" in server.lines[-1]
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0 and len(accepted) == 4
