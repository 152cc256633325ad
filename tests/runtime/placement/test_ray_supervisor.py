"""Ranks on real Ray clusters of this machine: started, killed, lost, interrupted. Nothing is left behind."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxima.config.sections.ranks_section import RayPlacement
from proxima.data import FieldError, UserError
from proxima.runtime.placement.ray_supervisor import RankEnd, first_cause, is_over, supervise

psutil = pytest.importorskip("psutil")
FUNCTIONS = "tests.runtime.placement.rank_functions"
SECONDS = 240
AGENTS = (["ray::DashboardAgent"], ["ray::RuntimeEnvAgent"])
RECONNECT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}  # that Ray's agents look for a dead head; 60 without it


def end(rank: int, code: int | None, at: float = 0.0) -> RankEnd:
    return RankEnd(rank=rank, exit_code=code, at=at)


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ([end(1, 0), end(0, 0)], 0),
        ([end(0, 70), end(2, -9), end(1, 70)], 2),  # the others raise because it is gone
        ([end(0, 1), end(2, -6)], 0),  # a run that failed as designed; the others are aborted
        ([end(0, 1), end(2, -9)], 2),  # rank 0 has said that rank 2 is gone, and was noticed first
        ([end(2, -6), end(0, 1)], 2),
        ([end(2, None), end(0, 130)], 0),
        ([end(2, 70), end(1, 2)], 1),  # a problem of the user's, which no restart solves
        ([end(1, 70), end(0, 70)], 1),
    ],
)
def test_the_first_cause(ends, cause):
    assert first_cause(ends).rank == cause


def test_when_a_run_is_over():
    assert not is_over({}, 2, 100.0)
    assert is_over({0: end(0, 0), 1: end(1, 0)}, 2, 0.0)
    assert not is_over({1: end(1, 0)}, 2, 1000.0)  # rank 0 has still to write
    assert not is_over({0: end(0, 0)}, 2, 59.0) and is_over({0: end(0, 0)}, 2, 61.0)
    assert not is_over({1: end(1, -9)}, 3, 2.0) and is_over({1: end(1, -9)}, 3, 4.0)


def records(folder: Path) -> list[dict[str, Any]]:
    """What the ranks noted, by rank and process."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def wait_for(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.1)
    return value


def alive(pids: list[int]) -> list[str]:
    """Those that still run, in words."""
    running = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                running.append(f"{pid} below {process.ppid()}: {' '.join(process.cmdline())}")
    return running


def require_gone(pids: list[int], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while (left := alive(pids)) and time.monotonic() < until:
        time.sleep(0.2)
    assert left == []


@pytest.fixture(scope="session")
def last_to_go() -> Iterator[list[int]]:
    """Processes that must be gone when all tests are done: an agent of Ray's whose raylet is killed tries for a minute,
    which no variable shortens, to tell the head."""
    pids = list[int]()
    yield pids
    require_gone(pids, 180)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a process that supervises two ranks on a cluster of its own."""
    pytest.importorskip("ray")
    processes: list[subprocess.Popen[str]] = []

    def start(function: str, fields: dict[str, Any] | None = None, **arguments: Any) -> "subprocess.Popen[str]":
        words = [function, str(tmp_path), json.dumps({"ranks": 2, **(fields or {})}), json.dumps(arguments)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        process = subprocess.Popen(
            [sys.executable, "-m", FUNCTIONS, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | RECONNECT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.waits
@pytest.mark.timeout(SECONDS)
def test_a_cluster_of_its_own(driver, tmp_path):
    process = driver("add_up", {"env": {"EXTRA": "yes"}})
    below = wait_for(lambda: [child.pid for child in psutil.Process(process.pid).children(recursive=True)])
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert out == "sum 3\n"
    assert sorted(err.splitlines()) == ["[rank 1] follows", "[rank 1] to the error stream", "to the error stream"]
    first, second = records(tmp_path)
    assert [rank["sum"] for rank in (first, second)] == [3.0, 3.0]
    assert (first["RANK"], first["LOCAL_RANK"], second["RANK"], second["LOCAL_RANK"]) == ("0", "0", "1", "1")
    assert {rank["EXTRA"] for rank in (first, second)} == {"yes"}
    assert {rank["python"] for rank in (first, second)} == {sys.executable}
    log = (tmp_path / "run.log").read_text().splitlines()
    assert {"[rank 0] sum 3", "[rank 1] follows"} < set(log) and len(log) == 4
    require_gone([*below, first["pid"], second["pid"]])


@pytest.mark.waits
@pytest.mark.timeout(2 * SECONDS)
def test_ctrl_c_and_a_driver_that_is_killed(driver, tmp_path, last_to_go):
    process = driver("wait")
    wait_for(lambda: len(records(tmp_path)) == 2)
    time.sleep(1)  # until they sleep
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130 and out.splitlines() == ["waits 0", "writes a checkpoint"], err
    assert "stopping: rank 0 writes a checkpoint first; press Ctrl-C again to kill all ranks" in err
    assert "died" not in err and "[rank 1] writes" not in err
    require_gone([rank["pid"] for rank in records(tmp_path)])

    for file in tmp_path.glob("*.json"):
        file.unlink()
    process = driver("wait")
    pids = [rank["pid"] for rank in wait_for(lambda: records(tmp_path) if len(records(tmp_path)) == 2 else None)]
    below = psutil.Process(process.pid).children(recursive=True)
    agents = {
        child.pid for child in below if child.cmdline()[:1] in (["ray::DashboardAgent"], ["ray::RuntimeEnvAgent"])
    }
    assert len(alive(pids)) == len(agents) == 2
    process.kill()
    require_gone([*{child.pid for child in below} - agents, *pids], 30)
    last_to_go += agents


@pytest.mark.waits
@pytest.mark.timeout(2 * SECONDS)
def test_nodes_of_a_cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        spread = {"ranks": 2, "gpus_per_rank": 0.0, "strategy": "STRICT_SPREAD"}

        with pytest.raises(FieldError, match="asks for 1 CPU each, with PACK, and the cluster has 3 CPU on 4 nodes"):
            supervise("no.such:thing", RayPlacement(ranks=4, gpus_per_rank=0.0), {})
        assert not ray.is_initialized()

        code, _, err = _supervised(tmp_path / "none", RayPlacement(**spread, restarts=2), victim=1, code=70)
        last = "ended with exit code 70; its last line: RuntimeError: a bad day: the run ends, --resume continues it"
        assert code == 70 and f"error: rank 1 on {os.uname().nodename}" in err and last in err

        code, out, err = _supervised(tmp_path / "killed", RayPlacement(**spread, restarts=1), victim=1, code=-9)
        assert code == 0 and out.splitlines() == ["waits 0", "resumed 0"]
        assert "died: killed by signal 9 (SIGKILL); all ranks restart" in err and "restart 1 of at most 1" in err
        assert "all 2 ranks run again; " in err and "s were lost" in err and "[rank 1] resumed 1" in err
        first = records(tmp_path / "killed")
        assert [rank["resume"] for rank in first].count(True) == 2
        assert {rank["GROUP_RANK"] for rank in first} == {"0", "1"} and {rank["LOCAL_RANK"] for rank in first} == {"0"}

        def lose_a_node() -> None:
            folder = tmp_path / "lost"
            wait_for(lambda: folder.is_dir() and len(records(folder)) == 2)
            rank = psutil.Process(records(folder)[1]["pid"])
            raylet = next(process for process in rank.parents() if "raylet" in process.name())
            raylet.kill()

        threading.Thread(target=lose_a_node, daemon=True).start()
        code, out, err = _supervised(tmp_path / "lost", RayPlacement(**spread, restarts=1))
        assert code == 0 and out.splitlines() == ["waits 0", "resumed 0"], err
        assert re.search("died: its node (was lost|does not answer); all ranks restart", err), err
        assert "connection error" not in err and "raylet" not in err

        with pytest.raises(UserError, match="start_timeout=5 was not enough|asks for 1 CPU each"):
            _supervised(tmp_path / "late", RayPlacement(**spread | {"ranks": 3}, start_timeout=5))
        pids = [rank["pid"] for folder in tmp_path.iterdir() for rank in records(folder)]
        assert len(pids) == 10
        require_gone(pids)
    finally:
        ray.shutdown()
        cluster.shutdown()


def _supervised(folder: Path, spec: RayPlacement, **arguments: Any) -> tuple[int, str, str]:
    folder.mkdir()
    out, err = io.StringIO(), io.StringIO()
    code = supervise(f"{FUNCTIONS}:wait", spec, {"folder": str(folder), **arguments}, out=out, err=err)
    return code, out.getvalue(), err.getvalue()
