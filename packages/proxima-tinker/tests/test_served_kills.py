"""A server that is killed: every client goes on, nothing is done twice, and the weights are those of an unbroken
run."""

import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import tinker
from safetensors.torch import load_file
from tinker import types
from tinker.proto import tinker_public_pb2 as protocol

from proxima.system.machine import usable_cores
from tests.engine.helpers import threads
from tests.ports import kept_port
from tests.warm import WarmPopen

from .conftest import running
from .data_of_clients import examples
from .plain_client import Client, add

ADAM = types.AdamParams(learning_rate=0.02)


class Killed:
    """A server in a process of its own, which is killed and started again on the same port."""

    def __init__(self, folder, model):
        self.folder, self.model, self.port = folder, model, kept_port()
        self.lines = []
        self.start()

    def start(self):
        words = ["-m", "proxima.cli.main", "serve-training", str(self.model), "--name", "tests/tiny"]
        words += ["--folder", str(self.folder), "--port", str(self.port), "--dtype", "float32"]
        self.process = WarmPopen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines.append(self.process.stdout.readline())
        assert "Ctrl-C stops it" in self.lines[-1], self.process.stderr.read()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"


def job(url, steps, losses):
    """A client's program: it trains, saves, and samples now and then."""
    client = tinker.ServiceClient(base_url=url)
    trainer = client.create_lora_training_client("tests/tiny", rank=4, seed=7).result()
    for step in range(steps):
        passes = [trainer.forward_backward(examples("cross_entropy", range(step + i, step + i + 3)), "cross_entropy")
                  for i in range(2)]  # fmt: skip
        stepped = trainer.optim_step(ADAM)
        losses.append([passed.result().metrics["loss:sum"] for passed in passes])
        losses[-1].append(stepped.result().metrics["grad_norm"])
        if step % 5 == 4:
            sampler = trainer.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=5, seed=step)
            answer = sampler.sample(types.ModelInput.from_ints([7, 8, 9]), 2, params).result()
            losses[-1].append([sequence.tokens for sequence in answer.sequences])
    return trainer.save_state("end").result().path


def weights(folder, path):
    run, segment, name = path.removeprefix("tinker://").split("/")
    return load_file(folder / "models" / run.replace(":", "-") / segment / name / "optimizer.safetensors")


def check(tmp_path, tiny_model, kills, steps):
    """A job has the same losses and the same state whether its server is killed so many times or not."""
    model, whole, broken, done = tiny_model("llama"), [], [], []
    cores = usable_cores()
    with threads(cores), running(tmp_path / "whole", model, tokens=4096, threads=cores) as served:
        expected = weights(tmp_path / "whole", job(served.url, steps, whole))
    server = Killed(tmp_path / "broken", model)
    thread = threading.Thread(target=lambda: done.append(job(server.url, steps, broken)))
    thread.start()
    draw = random.Random(0)
    for _ in range(kills):
        time.sleep(draw.uniform(0.02, 0.6))
        assert thread.is_alive(), "the client ended before the last kill"
        server.kill()
        server.start()
    thread.join(600)
    assert done, "the client did not end"
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    state = weights(tmp_path / "broken", done[0])
    assert broken == whole
    assert state.keys() == expected.keys() and all((state[name] == expected[name]).all() for name in state)
    assert {int(value) for name, value in state.items() if name.startswith("step.")} == {steps}


def test_a_killed_server_goes_on_where_it_was(tmp_path, tiny_model):
    check(tmp_path, tiny_model, kills=2, steps=6)


@pytest.mark.campaign("packages/proxima-tinker/tests/test_served_kills.py::test_a_killed_server_goes_on_where_it_was")
def test_fifty_kills(tmp_path, tiny_model):
    check(tmp_path, tiny_model, kills=50, steps=220)


def test_a_signal_while_requests_run_ends_the_server_and_loses_none(tmp_path, tiny_model):
    server = Killed(tmp_path, tiny_model("llama"))
    client = Client(server)
    message = protocol.ForwardBackwardRequest(model_id=client.model, seq_id=1, loss_fn="cross_entropy")
    for _ in range(50):
        add(message, tokens=[5] * 200, targets=[6] * 200)
    accepted = client.post("forward_backward", message.SerializeToString())
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [7]}]}
    for number in range(20):
        body = {"prompt": prompt, "sampling_params": {"stop": []}, "sampling_session_id": client.sampler}
        client.post("asample", body | {"seq_id": number}).raise_for_status()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    server.start()
    assert "1 models of earlier" in server.lines[-1]  # the request runs again, unless it had ended before the signal
    assert client.answer(accepted).headers["content-type"] == "application/x-protobuf"
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0 and server.process.stderr.read() == ""
