import os
import sys
import types

import pytest

from proxima.config.sections.ranks_section import RayPlacement
from proxima.data import FieldError, UserError
from proxima.runtime.placement import rank_group
from proxima.runtime.placement.rank_group import RankGroup, python_path, rank_order, rank_variables, start_group
from proxima.runtime.placement.rank_host import RankPlace
from tests.manual_clock import ManualClock


def place(node, gpus=(), host="vm"):
    return RankPlace(node=node, address=f"10.0.0.{node}", host=host, gpus=gpus, version="1")


def test_ranks_are_numbered_node_by_node_from_this_one():
    actors = [place("1"), place("2"), place("3"), place("2"), place("1"), place("2")]
    assert rank_order(actors, driver="3") == [2, 1, 3, 5, 0, 4]
    assert rank_order(actors, driver="elsewhere") == [1, 3, 5, 0, 4, 2]


def test_the_variables_of_torchrun():
    places = [place("1", ("4",)), place("1", ("2",)), place("2", ("0",))]
    first, second, third = rank_variables(places, 5000)
    numbers = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    meeting = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000", "PROXIMA_RANKS_STARTED_BY": "ray"}
    assert first == numbers | meeting | {"CUDA_VISIBLE_DEVICES": "4,2"}
    assert second == first | {"RANK": "1", "LOCAL_RANK": "1"}
    other = {"RANK": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert third == first | other
    assert "CUDA_VISIBLE_DEVICES" not in rank_variables([place("1")], 1)[0]  # whatever the node has stays visible


def test_names():
    group = RankGroup(None, [])
    group.places = [place("1"), place("1"), place("2", host="b")]
    assert [group.name_of(rank) for rank in (1, 2)] == ["rank 1 on vm", "rank 2 on b"]
    group.places = [place("1"), place("2")]
    assert group.name_of(1) == "rank 1 on vm (10.0.0.2)"


def test_modules_of_this_process_beside_the_installed_ones(monkeypatch, tmp_path):
    site = os.path.join(sys.prefix, "lib")
    monkeypatch.setattr(sys, "path", [str(tmp_path), site, str(tmp_path), str(tmp_path / "gone"), sys.base_prefix])
    assert python_path() == str(tmp_path)


def test_a_cluster_that_ends_during_the_start_is_one_line():
    def wait(timeout_seconds):
        raise Exception("Placement group PlacementGroupID(ba46) does not exist.")

    with pytest.raises(UserError, match=r"lost while .* PlacementGroupID\(ba46\) does not exist; .*--resume"):
        rank_group._granted(types.SimpleNamespace(wait=wait))


@pytest.mark.parametrize("pressed", [False, True])
def test_devices_that_are_not_granted_in_time_and_ctrl_c_before(pressed, monkeypatch):
    module = pytest.importorskip("ray.util.placement_group")
    clock, spec = ManualClock(), RayPlacement(ranks=2, start_timeout=5)

    def look():
        if pressed and clock.now() == 3:
            raise KeyboardInterrupt

    removed, group = [], types.SimpleNamespace(wait=lambda timeout_seconds: clock.advance(timeout_seconds))
    monkeypatch.setattr(module, "placement_group", lambda *_, **__: group)
    monkeypatch.setattr(RankGroup, "stop", lambda made: removed.append(made.placement_group))
    monkeypatch.setattr(rank_group, "time", types.SimpleNamespace(monotonic=clock.now))
    line = r"start_timeout=5 was not enough for the cluster to grant 2 ranks; others use its devices, or a node is lost"
    with pytest.raises(KeyboardInterrupt if pressed else FieldError, match=None if pressed else line):
        start_group(spec, None, look)
    assert clock.now() == (3 if pressed else 6) and removed == [group]
