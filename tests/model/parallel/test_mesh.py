"""How ranks are laid out: neighbours share sequences, and every weight has one place in each copy."""

import pytest
import torch
import torch.distributed as dist

from proxima.data import FieldError
from proxima.model.parallel.mesh import meshes_of
from proxima.model.parallel.sharding import Sharding

CPU = torch.device("cpu")


@pytest.fixture
def eight():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def ranks_of(mesh):
    return mesh.mesh.tolist()


def test_the_last_dimension_runs_fastest(eight):
    meshes = meshes_of(Sharding(tensor_parallel=2, context_parallel=2), CPU)
    assert ranks_of(meshes.shards) == [1, 3, 5, 7] and ranks_of(meshes.tensor) == [4, 5]
    assert ranks_of(meshes.context) == [5, 7] and meshes.expert is None


def test_experts_are_split_within_a_copy(eight, monkeypatch):
    meshes = meshes_of(Sharding(expert_parallel=2), CPU)
    assert ranks_of(meshes.expert) == [4, 5] and ranks_of(meshes.expert_shards) == [1, 3, 5, 7]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    hybrid = meshes_of(Sharding(kind="hybrid", expert_parallel=2), CPU)
    assert ranks_of(hybrid.shards) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ranks_of(hybrid.expert) == [4, 5] and ranks_of(hybrid.expert_shards) == [[1, 3], [5, 7]]


def test_copies_of_a_model_whose_matrices_are_split(eight):
    meshes = meshes_of(Sharding(kind="replicate", tensor_parallel=2), CPU)
    assert ranks_of(meshes.shards) == [[1], [3], [5], [7]] and ranks_of(meshes.tensor) == [4, 5]


@pytest.mark.parametrize(
    "sharding, of_a_node, field",
    [
        (Sharding(tensor_parallel=3), 8, "tensor_parallel"),
        (Sharding(tensor_parallel=2, context_parallel=8), 8, "context_parallel"),
        (Sharding(kind="hybrid", context_parallel=4), 2, "context_parallel"),
        (Sharding(expert_parallel=3), 8, "expert_parallel"),
        (Sharding(kind="hybrid"), 3, "LOCAL_WORLD_SIZE"),
    ],
)
def test_what_does_not_divide_is_refused(eight, sharding, of_a_node, field, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(of_a_node))
    with pytest.raises(FieldError, match=field):
        meshes_of(sharding, CPU)
