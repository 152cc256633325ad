"""Servers as actors on a real Ray cluster of this machine, below a run of two ranks: one is killed, and comes back."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from proxima.config import resolve
from proxima.data import FieldError
from proxima.engine.http import Vllm
from proxima.runtime.placement.engine_group import engine_plan
from proxima.runtime.placement.placed_engine import KEY, URLS, placed_engine
from tests.engine.http.ranked_run import until
from tests.engine.http.test_ranked_run import recipe

psutil = pytest.importorskip("psutil")


def test_what_the_servers_are_started_with(tmp_path):
    def config(*words):
        placement = "placement={kind: ray, ranks: 2, engines: 2}"
        return resolve("quickstart", [placement, *words]).config

    def plan_of(config):
        return engine_plan(config, tmp_path)

    plan = plan_of(config("engine=vllm"))
    assert plan is not None and plan.kind == "vllm" and plan.log == tmp_path / "engine.log"
    assert plan_of(resolve("quickstart", ["placement=ray", "engine=vllm"]).config) is None
    with pytest.raises(FieldError, match=r"placement\.engines=2.*engine\.kind"):
        plan_of(config("engine=local"))
    with pytest.raises(FieldError, match=r"engine\.url.*leave it out"):
        plan_of(config("engine={kind: vllm, url: http://127.0.0.1:1}"))
    with pytest.raises(FieldError, match=r"engine\.serve\.replicas=2.*must be 1"):
        plan_of(config("engine={kind: vllm, serve: {replicas: 2}}"))


def test_how_rank_0_finds_them(monkeypatch):
    spec = Vllm(interrupt="keep")
    assert placed_engine(spec) is spec
    monkeypatch.setenv(URLS, "http://127.0.0.1:1,http://127.0.0.1:2")
    monkeypatch.setenv(KEY, "a-key")
    placed = placed_engine(spec)
    assert placed.urls == ("http://127.0.0.1:1", "http://127.0.0.1:2") and placed.interrupt == "keep"
    assert [address.headers["Authorization"] for address in placed.addresses] == ["Bearer a-key"] * 2
    other = object()
    assert placed_engine(other) is other


@pytest.mark.slow
def test_a_server_whose_actor_is_killed_costs_no_step(tiny_model, tmp_path):
    program = tmp_path / "vllm"
    paths = os.pathsep.join(os.path.abspath(path or ".") for path in sys.path)
    variables = f"PYTHONPATH={paths} OMP_NUM_THREADS=1"
    program.write_text(f'#!/bin/sh\n{variables} exec {sys.executable} -m tests.engine.http.model_server "$@"\n')
    program.chmod(0o755)
    log = tmp_path / "supervisor.log"
    fractions = "gpus_per_rank: 0, cpus_per_rank: 0.25, gpus_per_engine: 0, cpus_per_engine: 0.25"
    engine = f"{{kind: vllm, health_seconds: 0.3, interrupt: finish, serve: {{executable: {program}}}}}"
    words = [*recipe(tiny_model("llama"), engine), f"folder={tmp_path}/run"]
    words += [f"placement={{kind: ray, ranks: 2, engines: 2, restarts: 0, {fractions}}}"]
    with log.open("wb") as stream:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "proxima.cli.main", "train", *words],
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )

    def replicas() -> list[int]:
        assert supervisor.poll() is None, log.read_text()[-6000:]
        file = tmp_path / "run" / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [int(row["sync/replicas"]) for row in map(json.loads, lines) if "sync/replicas" in row]

    try:
        until(lambda: len(replicas()) >= 2, log)
        children = psutil.Process(supervisor.pid).children(recursive=True)
        actors = [child for child in children if "EngineHost" in " ".join(child.cmdline())]
        assert len(actors) == 2, [child.cmdline() for child in children]
        actors[0].kill()
        until(lambda: replicas()[-1] == 1, log)
        until(lambda: replicas()[-1] == 2, log)
        proven = replicas()
        servers = [child for child in psutil.process_iter() if str(program) in _words(child)]
        supervisor.send_signal(signal.SIGINT)
        supervisor.wait(90)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(supervisor.pid, signal.SIGKILL)
    assert proven[:2] == [2, 2] and 1 in proven, proven
    assert "engine 0 died" in log.read_text() or "engine 1 died" in log.read_text()
    assert servers and not any(server.is_running() for server in servers)


def _words(process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
