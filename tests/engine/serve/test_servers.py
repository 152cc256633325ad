"""Servers that proxima starts: they answer, are restarted, and leave no process, however proxima ends."""

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress

import pytest

from proxima.data import FieldError, UserError
from proxima.engine.serve.launch import Launch, Serve
from proxima.engine.serve.servers import ServerProcess, check_serve, is_free, start_servers
from tests.engine.serve.programs import LONG, ask, fake_program, pids
from tests.processes import eventually, is_running
from tests.warm import WarmPopen


@pytest.fixture
def program(tmp_path):
    return fake_program(tmp_path)


@pytest.fixture
def begin(program, tmp_path, monkeypatch):
    """`begin(*arguments, **fields of Serve)`: running servers, which are closed at the end. They are looked after more
    often than usual, and started again at once."""
    monkeypatch.setattr("proxima.engine.serve.servers.BEAT", 0.02)
    monkeypatch.setattr("proxima.engine.serve.servers.LONGEST_BREAK", 0.05)
    opened = []

    def start(*arguments, key=None, max_length=None, **settings):
        serve = Serve(executable=program, arguments=arguments, **{"start_seconds": LONG} | settings)
        said = []
        more = {"max_length": max_length, "log": tmp_path / "engine.log", "report": said.append}
        servers = start_servers("vllm", serve, model="m", key=key, **more)
        opened.append(servers)
        servers.said = said
        return servers

    yield start
    for entry in opened:
        entry.close()


@pytest.mark.slow
def test_a_server_gets_what_the_engine_needs_and_the_key_in_no_file(begin, tmp_path):
    servers = begin(threads=3, max_length=64, variables={"MINE": "1"})
    (url,) = servers.urls
    with pytest.raises(urllib.error.HTTPError):
        ask(url, "/v1/models", "another")
    (model,) = ask(url, "/v1/models", servers.token)["data"]
    words, environment = model["argv"], model["environment"]
    assert words[1:3] == ["serve", "m"]
    assert [words[words.index(name) + 1] for name in ("--host", "--max-model-len", "--logprobs-mode")] == [
        "127.0.0.1",
        "64",
        "processed_logprobs",
    ]
    assert "--enable-scale-out" in words and servers.token not in " ".join(words)
    assert environment["VLLM_SERVER_DEV_MODE"] == environment["MINE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "3" and environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    log = (tmp_path / "engine.log").read_text()
    assert log.startswith("$ ") and "VLLM_SERVER_DEV_MODE=1" in log.splitlines()[0]
    assert servers.token not in log + "".join(servers.said)
    assert servers.said[0] == log.splitlines()[0]


@pytest.mark.slow
def test_replicas_have_ports_of_their_own_and_end_together(begin, tmp_path):
    servers = begin(replicas=2, key="")
    assert len(set(servers.urls)) == 2 and servers.token == ""
    for url in servers.urls:
        assert ask(url, "/v1/models")["data"]  # without a key, where none is wanted
    assert (tmp_path / "engine.1.log").exists()
    servers.close()
    for url in servers.urls:
        with pytest.raises(urllib.error.URLError):
            ask(url, "/health")


@pytest.mark.slow
@pytest.mark.parametrize("stubborn", [False, True])
def test_the_end_takes_what_a_server_has_started(begin, tmp_path, monkeypatch, stubborn):
    monkeypatch.setattr("proxima.engine.serve.servers.PATIENCE", 0.1 if stubborn else LONG)
    servers = begin("--child", str(tmp_path / "pids"), *(["--stubborn"] if stubborn else []))
    server, child = pids(tmp_path / "pids")
    assert is_running(server) and is_running(child)
    monkeypatch.setattr("proxima.engine.serve.servers.PATIENCE", LONG)  # of the guardian's end; its own is set
    servers.close()
    assert not is_running(server) and not is_running(child)


PARENT = """
import sys, time
from pathlib import Path
from proxima.engine.serve.launch import Serve
from proxima.engine.serve.servers import start_servers
serve = Serve(executable=sys.argv[1], arguments=("--child", sys.argv[2]))
servers = start_servers("vllm", serve, model="m", log=Path(sys.argv[3]))
print(servers.started[0].process._child.process.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["proxima", "guardian"])
def test_a_server_ends_with_proxima_and_with_its_guardian_killed_by_force(program, tmp_path, victim):
    words = [sys.executable, "-c", PARENT, program, str(tmp_path / "pids"), str(tmp_path / "engine.log")]
    with WarmPopen(words, stdout=subprocess.PIPE, text=True) as parent:
        try:
            guardian = int(parent.stdout.readline())
            server, child = pids(tmp_path / "pids")
            os.kill(parent.pid if victim == "proxima" else guardian, signal.SIGKILL)
            eventually(lambda: not is_running(server) and (victim == "guardian" or not is_running(child)))
        finally:
            parent.kill()
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port can't be kept")
def test_a_server_that_dies_is_started_again_at_its_address(begin, monkeypatch):
    """Which nobody else is given between the two starts."""
    monkeypatch.setattr("proxima.engine.serve.servers.LONGEST_BREAK", 0.3)
    servers = begin()
    (url,), (process,) = servers.urls, servers.started
    first, port = process.process, int(url.rpartition(":")[2])
    with pytest.raises((OSError, urllib.error.URLError)):
        ask(url, "/die")
    eventually(lambda: first.code is not None)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    eventually(lambda: process.process is not first and process.ready.is_set())
    assert ask(url, "/v1/models", servers.token)["data"]
    assert any("exit code 9" in line and "restarting in" in line for line in servers.said)
    assert servers.failure is None
    servers.close()
    assert is_free(port)


@pytest.mark.slow
def test_a_server_that_lives_on_without_its_core_is_started_again(begin, monkeypatch):
    monkeypatch.setattr("proxima.engine.serve.servers.HEALTH", 0.1)
    servers = begin()
    (process,) = servers.started
    first = process.process
    ask(servers.urls[0], "/fail")
    eventually(lambda: process.process is not first and process.ready.is_set())
    assert first.code is not None
    assert any("is not healthy any more: RuntimeError: the core is gone; restarting" in line for line in servers.said)


@pytest.mark.slow
def test_a_server_that_dies_too_often_is_given_up_with_the_reason(begin):
    servers = begin(restarts=0)
    with pytest.raises((OSError, urllib.error.URLError)):
        ask(servers.urls[0], "/die")
    assert str(servers.wait()).startswith(f"vllm 127.0.0.1:{servers.urls[0].rpartition(':')[2]} exit code 9: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "message"),
    [("exit 255", "exit code 255"), ("kill -KILL $$", "SIGKILL, which the kernel sends when memory runs out")],
)
def test_an_exit_code_above_128_is_a_signal_only_where_there_is_one(tmp_path, script, message):
    single = ServerProcess(Launch(command=("sh", "-c", script), url="http://127.0.0.1:1"), "", tmp_path / "engine.log")
    eventually(lambda: single.code is not None)
    single.stop()
    assert single.describe_exit() == message


@pytest.mark.slow
def test_a_server_that_dies_while_loading_ends_the_start_with_its_error(begin):
    said = "Traceback\nValueError: no room\nRuntimeError: Engine core initialization failed. See root cause"
    with pytest.raises(UserError, match="exit code 1: ValueError: no room; see ") as caught:
        begin("--die", said)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_server_that_never_answers_is_ended_after_a_time(begin, monkeypatch):
    answers = ServerProcess.answers

    def once_it_has_said_something(process):
        eventually(lambda: "Loading the weights" in process.output())
        return answers(process)

    monkeypatch.setattr(ServerProcess, "answers", once_it_has_said_something)
    with pytest.raises(
        UserError, match="has not answered for 0.2 s; its log ends with: Loading the weights from somew"
    ):
        begin("--deaf", start_seconds=0.2)


def test_what_can_be_seen_before_a_start(program, tmp_path):
    with pytest.raises(FieldError, match="executable='/nowhere/vllm' must be an executable file; .proxima engine inst"):
        check_serve("vllm", Serve(executable="/nowhere/vllm"), model="m")
    with pytest.raises(FieldError, match=f"environment='{tmp_path}/e' has no bin/vllm; .* --into {tmp_path}/e. inst"):
        check_serve("vllm", Serve(environment=f"{tmp_path}/e"), model="m")
    with pytest.raises(UserError, match="gguf"):
        check_serve("vllm", Serve(executable=program), model="m.gguf")
    with pytest.raises(UserError, match="proxima can't start other, only vllm, sglang; start other yourself and set e"):
        check_serve("other", Serve(executable=program), model="m")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(FieldError, match=f"port={port} is in use on 127.0.0.1: {port}; 0 takes a free one"):
            check_serve("vllm", Serve(executable=program, port=port), model="m")
    check_serve("vllm", Serve(environment=str(tmp_path), port=port), model="m")


@pytest.mark.parametrize(
    "bad", [{"replicas": 0}, {"port": 80}, {"port": 65535, "replicas": 2}, {"threads": -1}, {"max_length": 1},
            {"cache_gib": 0}, {"gpu_memory": 0.0}, {"start_seconds": 0.0}, {"restarts": -1}],
)  # fmt: skip
def test_bad_settings(bad):
    with pytest.raises(FieldError) as caught:
        Serve(**bad)
    assert caught.value.field == next(iter(bad))
