import os
import socket
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from proxima.config.sections.placement import RayPlacement
from proxima.data import FieldError, UserError
from proxima.runtime.placement import ray_cluster
from proxima.runtime.placement.ray_cluster import (
    HeadWatch,
    connected,
    fitted,
    kill_actor,
    python_path,
    reserve,
    start_actor,
)
from tests.manual_clock import ManualClock

pytest.importorskip("ray")
BUNDLES = pytest.importorskip("ray.util.placement_group")  # `ray.util` has a function of this name
CPUS = {"ranks": 3, "gpus_per_rank": 0.0, "cpus_per_rank": 2.0}
SHARED = {"ranks": 4, "engines": 2, "colocate": True, "gpus_per_rank": 0}
ROOM = "and the cluster has 7 CPU on 2 nodes, room for"
PLACEMENTS = [  # and what is said of it on these nodes
    (CPUS, None),
    (CPUS | {"strategy": "STRICT_PACK"}, f"ranks=3 asks for 2 CPU each, with STRICT_PACK, {ROOM}"),
    (CPUS | {"strategy": "STRICT_SPREAD"}, "room for 2; lower it, or add nodes"),
    (CPUS | {"strategy": "STRICT_SPREAD", "ranks": 2}, None),
    (CPUS | {"ranks": 4}, f"ranks=4 asks for 2 CPU each, with PACK, {ROOM} 3"),
    ({"ranks": 2}, "ranks=2 asks for 1 CPU and 1 GPU each, with PACK, and the cluster has 7 CPU and 1 GPU on 2 nodes"),
    (SHARED | {"strategy": "STRICT_PACK"}, f"engines=2 asks for 3 CPU each, with STRICT_PACK, {ROOM} 1"),
    (SHARED, None),
]


@pytest.mark.parametrize(("fields", "line"), PLACEMENTS)
def test_devices(monkeypatch, capsys, fields, line):
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0}}, {"Alive": True, "Resources": {"CPU": 3.0, "GPU": 1.0}}]
    monkeypatch.setattr("ray.nodes", lambda: [*nodes, {"Alive": False, "Resources": {"CPU": 99.0}}])
    spec = RayPlacement(**fields)
    if line is None:
        assert fitted(spec) is spec and capsys.readouterr().err == ""
        return
    with pytest.raises(FieldError) as caught:
        fitted(spec)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_a_cluster_without_gpus(monkeypatch, capsys):
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 8.0}}])
    assert fitted(RayPlacement(ranks=2)) == RayPlacement(ranks=2, gpus_per_rank=0)
    assert capsys.readouterr().err == "no node of the cluster has a GPU: the ranks compute on CPUs\n"
    with pytest.raises(FieldError, match="0 GPU on 1 node, room for 0; set gpus_per_rank=0 to compute on CPUs"):
        fitted(RayPlacement(ranks=2, engines=1, colocate=True))


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:x", ":1"])
def test_an_address_that_is_none(address):
    no_address = pytest.raises(FieldError, match="is HOST:PORT of the cluster's head")
    with no_address, connected(RayPlacement(address=address)):
        pass


def test_nothing_listens_there(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    line = "placement.address='127.0.0.1:1' has no cluster: Connection refused; start the cluster, or correct"
    with pytest.raises(FieldError, match=line), connected(RayPlacement()):
        pass


def test_a_cluster_of_this_machine_ends_with_the_block(monkeypatch):
    calls = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", lambda **options: calls.append((options["address"], options["include_dashboard"])))
    monkeypatch.setattr("ray.shutdown", lambda: calls.append("shutdown"))
    with pytest.raises(KeyError), connected(RayPlacement()):
        assert calls == [("local", False)]
        raise KeyError
    assert calls[1:] == ["shutdown"]


@pytest.mark.parametrize(
    ("address", "error", "line"),
    [
        (None, UserError, "no Ray cluster could be started on this machine: no token$"),
        ("auto", FieldError, "placement.address='auto' refuses this process: no token; all its nodes need one token"),
    ],
)
def test_a_cluster_that_refuses(address, error, line, monkeypatch):
    def refuse(**options):
        raise RuntimeError("no token.\nand much more")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(error, match=line), connected(RayPlacement(address=address)):
        pass


def test_what_is_killed_after_the_disconnect_starts_no_cluster(monkeypatch):
    monkeypatch.setattr("ray._private.auto_init_hook.enable_auto_connect", True)
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("a cluster was started"))
    made = SimpleNamespace(remote=lambda *_: object())
    monkeypatch.setattr("ray.remote", lambda kind: SimpleNamespace(options=lambda **_: made))
    kill_actor(start_actor(object, None))


def test_a_second_connection(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    with pytest.raises(ValueError, match="uses a Ray cluster already"), connected(RayPlacement()):
        pass


def test_modules_of_this_process_beside_the_installed_ones(monkeypatch, tmp_path):
    site = os.path.join(sys.prefix, "lib")
    monkeypatch.setattr(sys, "path", [str(tmp_path), site, str(tmp_path), str(tmp_path / "gone"), sys.base_prefix])
    assert python_path() == str(tmp_path)


def test_a_cluster_that_ends_during_the_start_is_one_line(monkeypatch):
    def wait(timeout_seconds):
        raise Exception("Placement group PlacementGroupID(ba46) does not exist.")

    monkeypatch.setattr(BUNDLES, "placement_group", lambda *_: SimpleNamespace(wait=wait))
    with pytest.raises(UserError, match=r"lost while .* PlacementGroupID\(ba46\) does not exist; .*--resume"):
        reserve(RayPlacement(), "ranks", {"CPU": 1.0})


@contextmanager
def listener(port=0):
    with socket.create_server(("127.0.0.1", port)) as server:
        yield server.getsockname()[1]


def test_a_head_that_does_not_answer_is_lost_after_a_while(monkeypatch):
    """One that is back before that is not."""
    clock = ManualClock()
    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(monotonic=clock.now, sleep=clock.advance))
    with listener() as port:
        head = HeadWatch(f"127.0.0.1:{port}")
        head.wait()
    for _ in range(8):
        clock.advance(3)
        head.check()  # for 24 s
    with listener(port):
        clock.advance(3)
        head.check()
    with pytest.raises(UserError) as told:
        head.wait()
    assert clock.now() == 27 + 25 and "\n" not in str(told.value)
    line = (
        f"the head of the Ray cluster, 127.0.0.1:{port}, has not answered for 25 s; start the cluster again; --resume"
    )
    assert str(told.value).startswith(line)


def test_a_head_is_not_asked_all_the_time(monkeypatch):
    clock = ManualClock()
    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(monotonic=clock.now))
    head, asked = HeadWatch("127.0.0.1:1"), []
    monkeypatch.setattr(head, "answers", lambda: bool(asked.append(clock.now())))
    monkeypatch.setattr(head, "_asked_at", 0.0)
    for _ in range(3):
        head.check()
        clock.advance(1)
    assert asked == [2.0]


def test_devices_that_are_not_granted_in_time(monkeypatch):
    clock, asked = ManualClock(), []
    granted = SimpleNamespace(wait=lambda timeout_seconds: clock.advance(timeout_seconds))
    monkeypatch.setattr(BUNDLES, "placement_group", lambda *what: asked.append(what) or granted)
    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(monotonic=clock.now))
    line = r"placement.ranks=2 asks for 1 CPU and 1 GPU each, not granted within start_timeout=5 s; others use"
    with pytest.raises(FieldError, match=line):
        reserve(RayPlacement(ranks=2, start_timeout=5, strategy="SPREAD"), "ranks", {"CPU": 1.0, "GPU": 1.0})
    assert clock.now() == 6 and asked == [([{"CPU": 1.0, "GPU": 1.0}] * 2, "SPREAD")]
