"""Ranks on a Ray cluster: started, killed, lost, interrupted. Nothing is left behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxima.config.sections.placement import RayPlacement
from proxima.data import FieldError, UserError
from proxima.runtime.placement import ray_cluster as placed_on
from proxima.runtime.placement import ray_supervisor
from proxima.runtime.placement.node_actors import ActorPlace
from proxima.runtime.placement.ray_cluster import HeadWatch
from proxima.runtime.placement.ray_supervisor import RankEnd, RankGroup, first_cause, supervise
from tests import ray_cluster
from tests.manual_clock import ManualClock
from tests.processes import eventually, is_running

pytest.importorskip("ray")
FUNCTIONS = "tests.runtime.placement.rank_functions"
PLACE = {"ranks": 2, "gpus_per_rank": 0.0, "cpus_per_rank": 0.5}


def end(rank: int, code: int | None) -> RankEnd:
    return RankEnd(rank=rank, exit_code=code, reason="its actor was killed" if code is None else "")


PLACES = [ActorPlace(node=name, address=name, host=name) for name in "ab"]


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ([end(1, 0), end(0, 0)], 0),
        ([end(0, 70), end(2, -9), end(1, 70)], 2),  # the others raise because it is gone
        ([end(0, 1), end(2, -6)], 0),  # a run that failed as designed; the others are aborted
        ([end(0, 1), end(2, -9)], 2),  # rank 0 has said that rank 2 is gone, and was noticed first
        ([end(2, -6), end(0, 1)], 2),
        ([end(2, None), end(0, 130)], 0),
        ([end(2, 1), end(0, 2)], 0),  # a problem of the user's, which rank 0 reports
        ([end(1, 0), end(2, 1)], 2),
        ([end(1, 0)], 1),  # a second Ctrl-C while rank 0 writes
    ],
)
def test_the_first_cause(ends, cause):
    assert first_cause(ends).rank == cause


BAD_DAY = RankEnd(rank=1, exit_code=1, reason="RuntimeError: a bad day")
KILLED = "rank 1 on b died: SIGKILL, which the kernel sends when memory runs out"
ENDS_OF_STARTS = {
    "killed": ([[end(1, -9)], [end(0, 0)]], 1, 0, [f"{KILLED}; all ranks restart from the last checkpoint, restart 1"]),
    "again": ([[end(1, -9)]] * 2, 1, 1, ["", f"error: {KILLED}; after 1 restarts (placement.restarts): the run ends"]),
    "no restarts": (
        [[end(1, -9)]],
        0,
        1,
        [f"error: {KILLED}; after 0 restarts (placement.restarts): the run ends, --resume"],
    ),
    "lost": ([[end(1, None)], [end(0, 0)]], 1, 0, ["rank 1 on b died: its node was lost; all ranks restart"]),
    "actor": ([[end(0, None)], [end(0, 0)]], 1, 0, ["rank 0 on a died: its actor was killed; all ranks restart"]),
    "raised": ([[end(1, 1)]], 2, 1, ["error: rank 1 on b ended with exit code 1: the run ends, --resume"]),
    "said why": (
        [[BAD_DAY]],
        2,
        1,
        [f"error: rank 1 on b ended with exit code 1; its last line: {BAD_DAY.reason}: the"],
    ),
    "reported": ([[end(1, 1), end(0, 1)]], 2, 1, []),
    "rank 0 raised": ([[end(0, 70)]], 2, 70, []),
    "refused": ([[end(0, 2), end(1, -6)]], 2, 2, []),
    "failed": ([[end(0, 1)]], 2, 1, []),
    "interrupted": ([[end(0, 130), end(1, -9)]], 2, 130, []),
}


def started_by(start_group, monkeypatch):
    """Without a cluster."""
    monkeypatch.setattr(ray_supervisor, "connected", lambda spec: contextlib.nullcontext())
    monkeypatch.setattr(ray_supervisor, "fitted", lambda spec: spec)
    monkeypatch.setattr(ray_supervisor, "start_group", start_group)


@pytest.mark.parametrize("case", ENDS_OF_STARTS)
def test_what_restarts_and_what_ends_a_run(case, monkeypatch, capsys):
    """Of two ranks on two nodes, of which the second is gone now; how they ended in each start is given."""
    starts, restarts, code, said = ENDS_OF_STARTS[case]
    begun, stopped = [], []

    class Group(RankGroup):
        def stop(self):
            stopped.append(len(begun))

    def start_group(spec, function, arguments, placed):
        begun.append(arguments)
        return Group(hosts=(), places=PLACES, reports=())

    started_by(start_group, monkeypatch)
    monkeypatch.setattr(ray_supervisor, "await_ranks", lambda *_: starts[len(begun) - 1])
    monkeypatch.setattr("ray.nodes", lambda: [{"NodeID": "a", "Alive": True}, {"NodeID": "b", "Alive": False}])
    assert supervise("a:b", RayPlacement(**PLACE, restarts=restarts), {"x": 1}) == code
    assert begun == [{"x": 1}, {"x": 1, "resume": True, "overwrite": False}][: len(starts)] and stopped == [
        start + 1 for start in range(len(begun))
    ]
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == len(said) and all(map(str.startswith, lines, said)), lines


News = list[tuple[float, int, int | None]]  # when, which rank, and its exit code


def watched(
    monkeypatch: pytest.MonkeyPatch, news: News, ranks: int = 2, placed: Any = None, interrupts: Sequence[int] = ()
) -> tuple[list[RankEnd], float]:
    """How ranks end of which this is heard, and when their watch has; `news` may be empty."""
    clock, reports = ManualClock(), [iter([(rank, number) for number in range(9)]) for rank in range(ranks)]
    heard = {rank: (at, code) for at, rank, code in news}

    def wait(waiting: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        ready = [report for rank, report in enumerate(reports) if report in waiting and rank in heard]
        ready = [report for report in ready if heard[reports.index(report)][0] <= clock.now()]
        if not ready:
            clock.advance(timeout)
        return ready, []

    monkeypatch.setattr("ray.wait", wait)
    monkeypatch.setattr("ray.get", lambda report: heard[report[0]][1])
    monkeypatch.setattr("ray.nodes", lambda: [{"NodeID": "a", "Alive": True}])
    monkeypatch.setattr(ray_supervisor, "time", SimpleNamespace(monotonic=clock.now))
    host = SimpleNamespace(interrupt=SimpleNamespace(remote=lambda: None))
    group = RankGroup(hosts=(host,), places=PLACES, reports=reports)
    return ray_supervisor.await_ranks(group, interrupts, placed), clock.now()


@pytest.mark.parametrize(
    ("news", "ranks", "over"),
    [
        ([(0, 0, 0), (0, 1, 0)], 2, 0),
        ([(0, 1, 0), (1000, 0, 0)], 2, 1000),  # rank 0 has still to write
        ([(1, 0, 0)], 2, 4),  # the others have had time to end
        ([(1, 1, -9), (2, 2, 1)], 3, 4),  # and to tell the cause
    ],
)
def test_when_a_run_is_over(news: News, ranks: int, over: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, seconds = watched(monkeypatch, news, ranks)
    assert [(end.rank, end.exit_code) for end in ends] == [(rank, code) for _, rank, code in news] and seconds == over


class Growing:
    """Servers that count how often they were looked at, and how often one more was asked for."""

    def __init__(self) -> None:
        self.polled = self.grown = 0
        self.interrupts: list[int] = []

    def poll(self) -> None:
        self.polled += 1
        if self.polled == 4:
            self.interrupts += [2, 2]

    def grow(self) -> None:
        self.grown += 1


@pytest.mark.parametrize(("news", "interrupts"), [([(0, 0, 0)], 0), ([(0, 1, None)], 0), ([], 1)])
def test_what_is_ending_starts_no_more_servers(news, interrupts, monkeypatch):
    """Rank 0 has ended and the other closes; a rank has failed and the cause is awaited; rank 0 writes a checkpoint."""
    servers = Growing()
    servers.interrupts += [2] * interrupts
    watched(monkeypatch, news, placed=servers, interrupts=servers.interrupts)
    assert servers.polled >= 4 and servers.grown == 0


def test_servers_are_started_while_ranks_run(monkeypatch):
    servers = Growing()
    watched(monkeypatch, [], placed=servers, interrupts=servers.interrupts)
    assert servers.grown == 3


@pytest.mark.parametrize("ends", [None, [end(0, None), end(1, None)]], ids=["they live", "with their nodes"])
def test_a_run_whose_head_is_lost_ends_with_one_line(ends, monkeypatch, capsys):
    """Whatever Ray would ask the head for is not called: the call would wait for it. Ranks that live are ended."""
    clock, ended = ManualClock(), []
    time = SimpleNamespace(monotonic=clock.now, sleep=clock.advance)
    for module in (ray_supervisor, placed_on):
        monkeypatch.setattr(module, "time", time)
    hosts = [SimpleNamespace(end=SimpleNamespace(remote=lambda rank=rank: ended.append(rank))) for rank in range(2)]

    def start_group(*_):
        head = HeadWatch("127.0.0.1:1")  # nobody listens there
        return RankGroup(hosts=hosts, places=PLACES, reports=("a", "b"), bundles="those of the ranks", head=head)

    def wait(calls, num_returns, timeout):
        clock.advance(timeout)
        return [], list(calls)

    started_by(start_group, monkeypatch)
    monkeypatch.setattr("ray.wait", wait)
    for call in ("ray.nodes", "ray.kill", "ray.util.remove_placement_group"):
        monkeypatch.setattr(call, lambda *_, **__: pytest.fail("the head was asked"))
    if ends is not None:
        monkeypatch.setattr(ray_supervisor, "await_ranks", lambda *_: ends)
    with pytest.raises(UserError, match="the head of the Ray cluster, 127.0.0.1:1, has not answered for 25 s; start"):
        supervise("a:b", RayPlacement(**PLACE, restarts=5), {})
    assert ended == [0, 1] and capsys.readouterr().err == ""


def test_ctrl_c_before_there_are_ranks(monkeypatch):
    def start_group(*_):
        os.kill(os.getpid(), signal.SIGINT)

    started_by(start_group, monkeypatch)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        supervise("a:b", RayPlacement(**PLACE), {})
    assert signal.getsignal(signal.SIGINT) is before


def supervised(folder: Path, acts: list[dict[str, str | int]], **fields: Any) -> int:
    """Exit code of two ranks that play."""
    folder.mkdir()
    arguments = {"folder": str(folder), "acts": acts, "supervisor": os.getpid()}
    return supervise(f"{FUNCTIONS}:play", RayPlacement(**PLACE | fields), arguments)


def records(folder: Path) -> list[dict[str, Any]]:
    """What the ranks noted, by rank and process."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


@pytest.mark.slow
@pytest.mark.waits
def test_an_actor_that_is_killed_and_then_ctrl_c(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address())
    monkeypatch.setattr(ray_supervisor, "GRACE_SECONDS", 0.2)
    folder, acts = tmp_path / "run", [{"1": "actor"}, {"0": "interrupt"}]
    most = {"cpus_per_rank": 3.0}  # the second start needs what the first has given back
    code = supervised(folder, acts, restarts=1, env={"EXTRA": "yes"}, **most)
    out, err = capsys.readouterr()
    host = os.uname().nodename
    printed = [line for line in out.splitlines() if "(raylet)" not in line]
    assert code == 130 and printed[-2:] == ["waits 0", "writes a checkpoint"], err
    died = f"^rank 1 on {host} died: its (actor was killed|node does not answer); all ranks restart .* 1 of at most 1$"
    assert re.search(died, err, re.MULTILINE)
    assert "stopping: rank 0 writes a checkpoint first; press Ctrl-C again to kill all ranks\n" in err
    assert "[rank 1] waits 1\n" in err and "[rank 1] writes" not in err and err.count(" died") == 1
    noted = records(folder)
    assert sorted((rank["RANK"], rank["resume"]) for rank in noted) == [
        (rank, again) for rank in "01" for again in (False, True)
    ]
    for rank in noted:
        assert (rank["WORLD_SIZE"], rank["LOCAL_RANK"], rank["LOCAL_WORLD_SIZE"]) == ("2", rank["RANK"], "2")
        assert (rank["GROUP_RANK"], rank["EXTRA"], rank["python"]) == ("0", "yes", sys.executable)
    eventually(lambda: not any(is_running(rank["pid"]) for rank in noted))


@pytest.mark.campaign("tests/runtime/placement/test_ray_supervisor.py::test_an_actor_that_is_killed_and_then_ctrl_c")
@pytest.mark.waits
def test_nodes_of_a_cluster(tmp_path, monkeypatch, capsys):
    psutil = pytest.importorskip("psutil")
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")
    monkeypatch.setenv("RAY_TMPDIR", ray_cluster.folder())
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        spread = {"cpus_per_rank": 1.0, "strategy": "STRICT_SPREAD", "restarts": 2}
        with pytest.raises(FieldError, match="asks for 1 CPU each, with PACK, and the cluster has 3 CPU on 4 nodes"):
            supervised(tmp_path / "none", [], cpus_per_rank=1.0, ranks=4)
        assert not ray.is_initialized()

        def lose_a_node() -> None:
            folder = tmp_path / "lost"
            eventually(lambda: len(records(folder)) == 4)
            (lost,) = (rank for rank in records(folder) if rank["RANK"] == "1" and rank["resume"])
            raylet = next(process for process in psutil.Process(lost["pid"]).parents() if "raylet" in process.name())
            raylet.kill()

        threading.Thread(target=lose_a_node, daemon=True).start()
        code = supervised(tmp_path / "lost", [{"1": "kill"}, {}, {"0": 0, "1": 0}], **spread)
        out, err = capsys.readouterr()
        assert code == 0 and out.splitlines().count("waits 0") == 3, err
        assert "died: SIGKILL, which" in err and "restart 1 of at most 2" in err
        assert re.search("died: its node (was lost|does not answer); .* restart 2 of at most 2", err), err
        assert "connection error" not in err and "raylet" not in err
        noted = records(tmp_path / "lost")
        assert len(noted) == 6 and all(rank["GROUP_RANK"] == rank["RANK"] for rank in noted)
        assert {rank["LOCAL_RANK"] for rank in noted} == {"0"}
        with pytest.raises(UserError, match="asks for 1 CPU each"):
            supervised(tmp_path / "late", [], **spread | {"ranks": 3, "start_timeout": 5})
        eventually(lambda: not any(is_running(rank["pid"]) for rank in noted))
    finally:
        ray.shutdown()
        cluster.shutdown()


DRIVER = """
import sys
from proxima.config.sections.placement import RayPlacement
from proxima.data import UserError
from proxima.runtime.placement.ray_supervisor import supervise
arguments = {{"folder": {folder!r}, "acts": []}}
try:
    sys.exit(supervise("{functions}:play", RayPlacement(**{place}, restarts=1), arguments))
except UserError as error:
    sys.exit(f"error: {{error}}")
"""


@pytest.mark.campaign(
    "tests/runtime/placement/test_ray_supervisor.py::test_a_run_whose_head_is_lost_ends_with_one_line", minutes=2
)
@pytest.mark.waits
@pytest.mark.parametrize("dies", [["gcs_server"], ["gcs_server", "raylet"]], ids=["the head", "its node"])
def test_a_head_that_is_killed(dies, tmp_path, monkeypatch):
    """Ray itself would end the process after a minute, with a line of its own about its insides."""
    psutil = pytest.importorskip("psutil")
    from ray.cluster_utils import Cluster

    for name, value in (ray_cluster.QUIET | {"RAY_TMPDIR": ray_cluster.folder()}).items():
        monkeypatch.setenv(name, value)
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    node = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    log = tmp_path / "log"
    try:
        code = DRIVER.format(folder=str(tmp_path), functions=FUNCTIONS, place=PLACE)
        with log.open("wb") as file:
            environment = os.environ | {"RAY_ADDRESS": cluster.address}
            driver = subprocess.Popen([sys.executable, "-c", code], stdout=file, stderr=file, env=environment)
        eventually(lambda: len(records(tmp_path)) == 2, log)
        own = [child for child in psutil.Process().children(recursive=True) if child.pid not in others]
        killed = [child for child in own if child.name() in dies]
        assert {child.name() for child in killed} == set(dies)
        for child in killed:
            child.kill()
        assert driver.wait(timeout=600) == 1
        *_, line = log.read_text().splitlines()
        assert re.match(
            r"error: the head of the Ray cluster, .*, has not answered for 25 s; .* --resume continues", line
        )
        assert "GCS" not in log.read_text()
        eventually(lambda: not any(is_running(rank["pid"]) for rank in records(tmp_path)))
    finally:
        cluster.shutdown()
