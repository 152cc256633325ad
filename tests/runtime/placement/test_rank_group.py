import pytest

from proxima.config.sections.placement import RayPlacement
from proxima.runtime.placement.node_actors import ActorPlace
from proxima.runtime.placement.ray_supervisor import _not_started, rank_order, rank_variables


def place(node, gpus=(), host="vm"):
    return ActorPlace(node=node, address=f"10.0.0.{node}", host=host, gpus=gpus, port=5000)


def test_ranks_are_numbered_node_by_node_from_this_one():
    actors = [place("1"), place("2"), place("3"), place("2"), place("1"), place("2")]
    assert rank_order(actors, driver="3") == [2, 1, 3, 5, 0, 4]
    assert rank_order(actors, driver="elsewhere") == [1, 3, 5, 0, 4, 2]


def test_the_variables_of_torchrun():
    places = [place("1", ("4",)), place("1", ("2",)), place("2", ("0",))]
    first, second, third = rank_variables(places)
    numbers = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    meeting = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000", "PROXIMA_RANKS_STARTED_BY": "ray"}
    assert first == numbers | meeting | {"CUDA_VISIBLE_DEVICES": "4,2"}
    assert second == first | {"RANK": "1", "LOCAL_RANK": "1"}
    other = {"RANK": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert third == first | other
    assert "CUDA_VISIBLE_DEVICES" not in rank_variables([place("1")])[0]  # whatever the node has stays visible


def test_what_an_actor_that_does_not_start_says():
    errors = pytest.importorskip("ray.exceptions")
    spec = RayPlacement(start_timeout=5)
    missing, failed = "ModuleNotFoundError: No module named 'proxima'", "a rank could not be started: "
    for error, line in (
        (errors.GetTimeoutError("Get timed out"), "the ranks did not start within placement.start_timeout=5 s; see"),
        (RuntimeError(f"ray::RankHost\n  {missing}"), f"{failed}{missing}; install the same packages on all nodes"),
    ):
        assert str(_not_started(error, spec)).startswith(line)
    for error, line in ((RuntimeError("\n  The actor died:\n\tpid: 3\n"), "The actor died"), (KeyError(), "KeyError")):
        assert str(_not_started(error, spec)) == f"{failed}{line}"
