"""Servers as actors on a real Ray cluster of this machine: one is killed, and comes back."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from proxima.config.resolution import resolve
from proxima.config.sections.placement import RayPlacement
from proxima.data import FieldError, UserError
from proxima.engine.http.vllm import Vllm
from proxima.engine.serve.launch import Serve
from proxima.runtime.placement import engine_group
from proxima.runtime.placement.engine_group import EngineGroup, EnginePlan, PlacedEngine, engine_plan
from proxima.runtime.placement.launcher import KEY, SERVERS, placed_engine
from proxima.runtime.placement.node_actors import ActorPlace
from proxima.runtime.placement.ray_cluster import bundle_of
from tests import ray_cluster
from tests.engine.http.test_joining_servers import recipe
from tests.processes import eventually, is_running

psutil = pytest.importorskip("psutil")

UNSEEN = FieldError("engine.weight_folder", None, "is needed", remedy="set it")


def test_what_the_servers_are_started_with(tmp_path):
    def plan_of(engine, placement="{kind: ray, ranks: 2, engines: 2}"):
        return engine_plan(resolve("quickstart", [f"placement={placement}", f"engine={engine}"]).config, tmp_path)

    plan = plan_of("vllm")
    assert plan is not None and plan.arguments["kind"] == "vllm" and not plan.arguments["routed_experts"]
    assert plan_of("{kind: vllm, routed_experts: true}").arguments["routed_experts"]
    assert plan_of("vllm", "ray") is None
    for engine, message in (
        ("local", r"placement\.engines=2.*engine\.kind"),
        ("{kind: vllm, url: http://127.0.0.1:1}", r"engine\.url.*leave it out"),
        ("{kind: vllm, serve: {replicas: 2}}", r"engine\.serve\.replicas=2.*must be 1"),
    ):
        with pytest.raises(FieldError, match=message):
            plan_of(engine)
    assert plan.unreached is None and plan_of("{kind: vllm, transfer: folder}").unreached is not None
    together = "{kind: ray, ranks: 4, engines: 2, colocate: true}"
    for engine, message in (
        (
            "{kind: vllm, transfer: group}",
            r"engine\.transfer='group'.*a group would have two members on one; use ipc or auto",
        ),
        (
            "{kind: sglang, transfer: ipc}",
            r"engine\.transfer='ipc' is not offered by every server; use folder, and set",
        ),
    ):
        with pytest.raises(FieldError, match=message):
            plan_of(engine, together)
    assert plan_of("{kind: vllm, weight_folder: /w}", together).unreached is None
    with pytest.raises(FieldError, match=r"engine\.transfer='ipc'.*the GPUs of the ranks \(placement.colocate\)"):
        plan_of("{kind: vllm, transfer: ipc}", "{kind: ray, engines: 2, gpus_per_engine: 1}")
    colocated = plan_of("vllm", together)
    assert colocated.unreached is None  # by ipc, to every node
    assert "--enable-sleep-mode" in colocated.arguments["serve"].arguments
    assert plan_of("{kind: vllm, transfer: folder}", together).unreached is not None
    by_files = plan_of("sglang", together)
    assert by_files.unreached is not None and "--enable-memory-saver" in by_files.arguments["serve"].arguments
    on_a_cpu = plan_of("vllm", "{kind: ray, engines: 1, gpus_per_rank: 0, colocate: true}")
    assert not on_a_cpu.arguments["serve"].arguments  # vLLM has no sleep mode there


def test_the_servers_of_a_plan_differ_in_their_logs(tmp_path):
    plan = EnginePlan(
        arguments={"serve": Serve(arguments=("--x",)), "log": tmp_path / "engine.log"}, file=tmp_path / "servers.txt"
    )
    here, there = (plan.start_of(n, "a-key", remote=bool(n), port=8000 * n).keywords for n in range(2))
    assert here == plan.arguments | {"key": "a-key"}
    assert there["log"] == tmp_path / "engine.1.log"
    assert there["serve"].arguments == ("--x", "--host", "0.0.0.0") and there["serve"].port == 8000


def test_how_rank_0_finds_them(monkeypatch, tmp_path):
    spec, file = Vllm(interrupt="keep"), tmp_path / "servers.txt"
    assert placed_engine(spec) is spec
    file.write_text("http://127.0.0.1:1\nhttp://127.0.0.1:2\n")
    monkeypatch.setenv(SERVERS, str(file))
    monkeypatch.setenv(KEY, "a-key")
    placed = placed_engine(spec)
    assert placed.urls == ("http://127.0.0.1:1", "http://127.0.0.1:2") and placed.interrupt == "keep"
    assert [address.key for address in placed.addresses] == ["a-key"] * 2 and placed.on_this_machine
    other = object()
    assert placed_engine(other) is other
    file.write_text("http://10.0.0.1:1\n")
    assert placed_engine(spec).allow_remote and not placed_engine(spec).on_this_machine


@pytest.fixture
def group(tmp_path):
    """Two servers on two nodes, as once they have started; no cluster."""
    group = object.__new__(EngineGroup)
    group.spec, group.key = RayPlacement(ranks=4, engines=2, colocate=True), "a-key"
    group.plan = EnginePlan(arguments={}, file=tmp_path / "run" / "servers.txt")
    group.engines = [PlacedEngine(number, (None, number), address=("127.0.0.1", number + 1)) for number in range(2)]
    for engine, gpus in zip(group.engines, (("4", "5"), ("0", "1")), strict=True):
        engine.place = ActorPlace(node=gpus[0], host="h", address="a", port=1, gpus=gpus)
    return group


@pytest.mark.parametrize(
    ("settings", "gpus", "reserved"),
    [
        ({"ranks": 4, "engines": 2, "colocate": True}, 2.0, {"CPU": 3.0, "GPU": 2.0}),
        ({"ranks": 4, "engines": 2, "gpus_per_engine": 3.0}, 3.0, {"CPU": 1.0, "GPU": 3.0}),
        ({"ranks": 4, "engines": 2, "gpus_per_engine": 0.0}, 0.0, {"CPU": 1.0}),
    ],
)
def test_a_server_asks_for_its_own_devices_or_for_those_of_its_ranks(settings, gpus, reserved, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: [{"Alive": True}]))
    monkeypatch.setattr(engine_group, "reserve", lambda spec, name, bundle: asked.append(bundle))
    for name in ("_require_reach", "_await_all"):
        monkeypatch.setattr(EngineGroup, name, lambda group, **_: None)
    made = EngineGroup(RayPlacement(**settings), EnginePlan(arguments={}, file=tmp_path / "servers.txt"))
    assert made.resources == {"num_cpus": 1.0, "num_gpus": gpus} and asked == [reserved]
    assert made.remote is False and len(made.engines) == 2


def test_the_devices_of_a_server_are_shared_out_to_its_ranks(group):
    assert bundle_of(group.spec) == {"CPU": 3.0, "GPU": 2.0} and group.spec.bundles == 2
    assert group.devices() == [("4",), ("5",), ("0",), ("1",)]


def test_ranks_find_the_servers_in_a_file(group):
    places = [engine.place for engine in group.engines]
    file = group.plan.file
    group.plan = replace(group.plan, unreached=UNSEEN)
    with pytest.raises(FieldError, match=r"weight_folder=None is needed: engine 1 is on h, and rank 0 is not; set it"):
        group.attach(places)
    group.plan = replace(group.plan, unreached=None)
    assert group.attach(places) == {SERVERS: str(file), KEY: "a-key"}
    urls = [line for line in file.read_text().splitlines() if line.startswith("http")]
    assert urls == ["http://127.0.0.1:1", "http://127.0.0.1:2"]


@pytest.mark.parametrize("nodes", [["a", "a"], ["a", "b"]])
def test_weights_that_would_not_reach_all_nodes_are_refused_before_a_server_starts(group, nodes, monkeypatch):
    table = SimpleNamespace(placement_group_table=lambda bundles: {"bundles_to_node_id": dict(enumerate(nodes))})
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", table)
    group.bundles = None
    group.plan = replace(group.plan, unreached=UNSEEN)
    if nodes == ["a", "b"]:
        with pytest.raises(FieldError, match=r"weight_folder=None is needed: the 2 servers are on 2 nodes; set it"):
            group._require_reach()
        group.plan = replace(group.plan, unreached=None)
    group._require_reach()


@pytest.mark.parametrize(
    ("engine", "placement", "message"),
    [
        ("vllm", "engines: 0, max_engines: 2", "max_engines=2.* needs servers to begin with"),
        ("vllm", "engines: 3, max_engines: 2", "max_engines=2.* must be >= engines=3"),
        ("vllm", "engines: 1, max_engines: 2, colocate: true", "max_engines=2.* is not possible with colocate"),
        ("vllm", "engines: 1, max_engines: 2", ""),
        ("{kind: vllm, transfer: group}", "engines: 1, max_engines: 2", ""),
        ("{kind: vllm, weight_folder: /w}", "engines: 1, max_engines: 2", ""),
        ("{kind: vllm, transfer: folder}", "engines: 1, max_engines: 2", "needs weight_folder: .*use group or auto"),
    ],
)
def test_more_servers_must_be_possible(engine, placement, message, tmp_path):
    def plan():
        words = [f"placement={{kind: ray, ranks: 2, {placement}}}", f"engine={engine}"]
        return engine_plan(resolve("quickstart", words).config, tmp_path)

    if not message:
        assert plan().unreached is None
        return
    with pytest.raises(UserError, match=message):
        plan()


def program_of(tmp_path, calls):
    """A program that is started as vLLM is, and notes the calls of each server in a file."""
    program = tmp_path / "vllm"
    calls.mkdir()
    paths = os.pathsep.join(os.path.abspath(path or ".") for path in sys.path)
    variables = f"PYTHONPATH={paths} OMP_NUM_THREADS=1 MODEL_SERVER_CALLS={calls}"
    program.write_text(f'#!/bin/sh\n{variables} exec {sys.executable} -m tests.engine.http.model_server "$@"\n')
    program.chmod(0o755)
    return program


@pytest.mark.campaign("tests/engine/http/test_server_file.py::test_a_server_joins_with_the_newest_weights_and_leaves")
@pytest.mark.waits
def test_a_node_that_joins_the_cluster_gets_a_server(tiny_model, tmp_path, monkeypatch):
    """In the middle of the run, which goes on when the node is lost."""
    from ray.cluster_utils import Cluster

    for name, value in (ray_cluster.QUIET | {"RAY_TMPDIR": ray_cluster.folder()}).items():
        monkeypatch.setenv(name, value)
    calls, log = tmp_path / "calls", tmp_path / "log"
    serve = f"{{executable: {program_of(tmp_path, calls)}}}"
    sent = f"weight_folder: {tmp_path}/weights"
    words = recipe(tiny_model("llama"), f"{{kind: vllm, health_seconds: 0.3, {sent}, serve: {serve}}}")
    fractions = "gpus_per_rank: 0, gpus_per_engine: 0, cpus_per_rank: 0.5, cpus_per_engine: 0.5"
    words += [f"placement={{kind: ray, ranks: 1, engines: 1, max_engines: 2, restarts: 0, {fractions}}}"]
    command = [sys.executable, "-m", "proxima.cli.main", "train", *words, f"folder={tmp_path}/run"]
    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster, run = Cluster(initialize_head=True, head_node_args={"include_dashboard": False} | node), None

    def steps():
        assert run.poll() is None, log.read_text()[-6000:]
        file = tmp_path / "run" / "metrics.jsonl"
        rows = map(json.loads, file.read_text().splitlines() if file.exists() else [])
        return [row for row in rows if "sync/replicas" in row]

    try:
        with log.open("wb") as stream:
            environment = os.environ | {"RAY_ADDRESS": cluster.address}
            run = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True, env=environment)
        eventually(lambda: len(steps()) >= 3, log)
        assert all(step["replicas/of"] == 1 for step in steps())
        added = cluster.add_node(**node)
        eventually(lambda: steps()[-1]["sync/replicas"] == 2, log)
        assert sum(step["replicas/joined"] for step in steps()) == 1
        cluster.remove_node(added)
        eventually(lambda: steps()[-1]["sync/replicas"] == 1, log)
        done = len(steps())
        eventually(lambda: len(steps()) >= done + 2, log)
        assert [step["step"] for step in steps()] == list(range(1, len(steps()) + 1))
        run.send_signal(signal.SIGINT)
        run.wait()
    finally:
        if run is not None:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        cluster.shutdown()
    text = log.read_text()
    assert "engine 1 is started: the cluster has devices for it" in text and "has joined, with weights" in text, text
    eventually(lambda: not any(is_running(int(file.name)) for file in calls.iterdir()), log)


@pytest.mark.campaign("tests/engine/http/test_joining_servers.py::test_servers_that_die_return_and_join_late")
@pytest.mark.waits
def test_a_run_that_shares_its_devices_with_servers_of_which_one_is_killed(tiny_model, tmp_path):
    """The death costs no step, and the servers sleep during each update."""
    calls, log = tmp_path / "calls", tmp_path / "log"
    serve = f"{{executable: {program_of(tmp_path, calls)}, arguments: [--enable-sleep-mode]}}"
    words = recipe(tiny_model("llama"), f"{{kind: vllm, health_seconds: 0.3, interrupt: finish, serve: {serve}}}")
    fractions = "gpus_per_rank: 0, cpus_per_rank: 0.25, cpus_per_engine: 0.25"
    words += [f"placement={{kind: ray, ranks: 2, engines: 2, colocate: true, restarts: 0, {fractions}}}"]
    command = [sys.executable, "-m", "proxima.cli.main", "train", *words, f"folder={tmp_path}/run"]
    with log.open("wb") as stream:
        environment = os.environ | {"RAY_TMPDIR": ray_cluster.folder()}
        run = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True, env=environment)

    def replicas() -> list[int]:
        assert run.poll() is None, log.read_text()[-6000:]
        file = tmp_path / "run" / "metrics.jsonl"
        rows = map(json.loads, file.read_text().splitlines() if file.exists() else [])
        return [int(row["sync/replicas"]) for row in rows if "sync/replicas" in row]

    try:
        eventually(lambda: len(replicas()) >= 2, log)
        children = psutil.Process(run.pid).children(recursive=True)
        actors = [child for child in children if "EngineHost" in " ".join(child.cmdline())]
        assert len(actors) == 2, [child.cmdline() for child in children]
        actors[0].kill()
        eventually(lambda: replicas()[-1] == 1, log)
        eventually(lambda: replicas()[-1] == 2, log)
        proven = replicas()
        run.send_signal(signal.SIGINT)
        run.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    assert proven[:2] == [2, 2] and 1 in proven, proven
    assert "engine 0 died" in log.read_text() or "engine 1 died" in log.read_text()
    assert len(list(calls.iterdir())) == 3
    eventually(lambda: not any(is_running(int(file.name)) for file in calls.iterdir()), log)
    names = {"/sleep": "sleep", "/wake_up": "wake", "/finish_weight_update": "load", "/inference/v1/generate": "use"}
    order = list[str]()
    survivor = max(calls.iterdir(), key=lambda file: file.stat().st_size)
    for path, query in (line.split(" ", 1) for line in survivor.read_text().splitlines()):
        name = names.get(path, "") + (query.strip().removeprefix("tags=").join("()") if path == "/wake_up" else "")
        if name and order[-1:] != [name]:
            order.append(name)
    step = ["sleep", "wake(weights)", "wake(kv_cache)", "load", "use"]  # the last use is the probe of the weights
    steps = order[order.index("sleep") :]
    assert steps == (step * len(steps))[: len(steps)] and len(steps) > 10, order
