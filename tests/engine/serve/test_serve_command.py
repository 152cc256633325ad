"""`proxima engine serve`, with a fake of the server's program."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from proxima.cli.main import main
from tests.engine.serve.programs import ask, fake_program, pids
from tests.ports import kept_port
from tests.processes import is_running
from tests.warm import WarmPopen

RECIPE = """\
model: {{path: {model}, max_length: 64}}
task: {{kind: arithmetic, low: 1, high: 9, size: 20}}
reward: number
algorithm: cppo
train: {{steps: 2, prompts_per_step: 2, completions_per_prompt: 2, optimizer: {{lr: 1e-4}}}}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch, tiny_model):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("proxima.engine.serve.servers.BEAT", 0.02)
    Path("tiny.yaml").write_text(RECIPE.format(model=tiny_model("llama")))
    return "tiny.yaml"


@pytest.mark.slow
def test_it_serves_the_recipe_until_ctrl_c_and_says_how_to_train(recipe, tmp_path):
    program = fake_program(tmp_path)
    engine = f"engine={{kind: vllm, serve: {{executable: {program}, arguments: [--child, {tmp_path}/pids]}}}}"
    words = [sys.executable, "-m", "proxima.cli.main", "engine", "serve", recipe, engine]
    source = str(Path(__file__).resolve().parents[3] / "src")
    command = WarmPopen(
        words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": source}, start_new_session=True
    )
    try:
        said = []
        while not said or said[-1] != "Ctrl-C stops it\n":
            said.append(command.stdout.readline())
            assert said[-1], said
        train = next(line for line in said if line.startswith("train "))
        assert " proxima train tiny.yaml " in train and "engine.serve=null engine.url=http://127.0.0.1:" in train
        url = train.rpartition("engine.url=")[2].split()[0]
        key = train.split()[1].removeprefix("PROXIMA_ENGINE_KEY=")
        (model,) = ask(url, "/v1/models", key)["data"]
        assert model["argv"][model["argv"].index("--max-model-len") + 1] == "64"
        server, child = pids(tmp_path / "pids")
        os.killpg(command.pid, signal.SIGINT)
        assert command.wait() == 0
        assert not is_running(server) and not is_running(child)
        assert "Loading the weights" in (tmp_path / "runs" / "server.log").read_text()
    finally:
        command.kill()
        command.wait()


@pytest.mark.slow
def test_a_url_of_this_machine_says_where_to_serve(recipe, tmp_path, monkeypatch, capsys):
    port = kept_port()
    monkeypatch.setenv("PATH", f"{Path(fake_program(tmp_path)).parent}:{os.environ['PATH']}")
    monkeypatch.setattr("proxima.engine.serve.servers.Servers.wait", ended_by_ctrl_c)
    assert main(["engine", "serve", recipe, "engine=vllm", f"engine.url=http://127.0.0.1:{port}"]) == 0
    out = capsys.readouterr().out
    assert f"vllm 127.0.0.1:{port}  answers after" in out
    assert f"train    proxima train tiny.yaml engine=vllm engine.url=http://127.0.0.1:{port}\n" in out


def ended_by_ctrl_c(servers):
    assert ask(servers.urls[0], "/v1/models")["data"]  # without a key: the recipe has none
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["engine=local"], "error: engine.kind=local (command line): is not a server; set engine=vllm"),
        (
            ["engine={kind: vllm, url: [http://127.0.0.1:8000, http://127.0.0.1:9000]}"],
            "error: engine.url=['http://127.0.0.1:8000', 'http://127.0.0.1:9000'] (command line): must have con",
        ),
    ],
)
def test_what_can_not_be_served_is_one_line(recipe, capsys, words, line):
    assert main(["engine", "serve", recipe, *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(line) and err.count("\n") == 1


def test_a_model_that_does_not_exist_starts_nothing(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("proxima.engine.serve.servers.Servers.start", lambda _: pytest.fail("a server was started"))
    engine = f"engine={{kind: vllm, serve: {{executable: {fake_program(tmp_path)}}}}}"
    assert main(["engine", "serve", recipe, engine, "model.path=models/missing"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: model.path=models/missing (command line): does not exist")
    assert err.count("\n") == 1 and not (tmp_path / "runs").exists()
