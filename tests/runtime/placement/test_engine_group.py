"""Servers as actors on a real Ray cluster of this machine, below a run of two ranks: one is killed, and comes back."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from proxima.config import resolve
from proxima.config.sections.ranks_section import RayPlacement
from proxima.data import FieldError
from proxima.engine.http import Vllm
from proxima.runtime.placement.engine_group import EngineGroup, PlacedEngine, engine_plan
from proxima.runtime.placement.engine_host import EnginePlace
from proxima.runtime.placement.placed_engine import KEY, URLS, placed_engine
from proxima.runtime.placement.ray_cluster import bundle_of
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
    assert not plan.routed_experts and plan_of(config("engine={kind: vllm, routed_experts: true}")).routed_experts
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


@pytest.mark.waits
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
    assert servers and not any(_computes(server) for server in servers)


def test_colocated_servers_take_turns_with_the_ranks(tmp_path):
    config = resolve(
        "quickstart", ["placement={kind: ray, ranks: 4, engines: 2, colocate: true}", "engine=vllm"]
    ).config
    plan = engine_plan(config, tmp_path)
    assert plan is not None and "--enable-sleep-mode" in plan.serve.arguments
    assert bundle_of(config.placement) == {"CPU": 3.0, "GPU": 2.0} and config.placement.bundles == 2
    cpus = resolve("quickstart", ["placement={kind: ray, engines: 1, gpus_per_rank: 0, colocate: true}", "engine=vllm"])
    plan = engine_plan(cpus.config, tmp_path)  # vLLM has no sleep mode on a CPU
    assert plan is not None and not plan.serve.arguments


def test_the_devices_of_a_server_are_shared_out_to_its_ranks():
    group = object.__new__(EngineGroup)
    group.spec = RayPlacement(ranks=4, engines=2, colocate=True)
    group.engines = [PlacedEngine(number) for number in range(2)]
    for engine, gpus in zip(group.engines, (("4", "5"), ("0", "1")), strict=True):
        engine.place = EnginePlace(node="n", host="h", address="a", port=1, gpus=gpus)
    assert group.devices(lambda: None) == [("4",), ("5",), ("0",), ("1",)]


@pytest.mark.waits
@pytest.mark.slow
def test_servers_sleep_during_each_update_of_a_run_that_shares_its_devices(tiny_model, tmp_path):
    program, calls = tmp_path / "vllm", tmp_path / "calls"
    calls.mkdir()
    paths = os.pathsep.join(os.path.abspath(path or ".") for path in sys.path)
    variables = f"PYTHONPATH={paths} OMP_NUM_THREADS=1 MODEL_SERVER_CALLS={calls}"
    program.write_text(f'#!/bin/sh\n{variables} exec {sys.executable} -m tests.engine.http.model_server "$@"\n')
    program.chmod(0o755)
    serve = f"{{executable: {program}, arguments: [--enable-sleep-mode]}}"
    words = recipe(tiny_model("llama"), f"{{kind: vllm, interrupt: finish, serve: {serve}}}")
    words = ["train.steps=3" if word.startswith("train.steps") else word for word in words] + [f"folder={tmp_path}/run"]
    fractions = "gpus_per_rank: 0, cpus_per_rank: 0.25, cpus_per_engine: 0.25"
    words += [f"placement={{kind: ray, ranks: 2, engines: 1, colocate: true, restarts: 0, {fractions}}}"]
    log = tmp_path / "log"
    with log.open("wb") as stream:
        command = [sys.executable, "-m", "proxima.cli.main", "train", *words]
        run = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)
        try:
            code = run.wait(240)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    assert code == 0, log.read_text()[-6000:]
    [file] = calls.iterdir()
    names = {"/sleep": "sleep", "/wake_up": "wake", "/finish_weight_update": "load", "/inference/v1/generate": "use"}
    order = list[str]()
    for path, query in (line.split(" ", 1) for line in file.read_text().splitlines()):
        name = names.get(path, "") + (query.strip().removeprefix("tags=").join("()") if path == "/wake_up" else "")
        if name and order[-1:] != [name]:
            order.append(name)
    step = ["sleep", "wake(weights)", "wake(kv_cache)", "load", "use"]  # the last use is the probe of the weights
    assert order[order.index("sleep") :] == step * 3, order
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["sync/replicas"] for row in rows if row["kind"] == "train"] == [1.0] * 3


def _computes(process) -> bool:
    """Whether it has not ended; one that nobody has waited for yet has."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _words(process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
