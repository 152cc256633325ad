"""The processes of a run, as a user types them."""

import pytest

from proxima.config.families import OFFLINE
from proxima.config.resolution import resolve
from proxima.config.resolved import dump
from proxima.config.sections.placement import (
    FullSharding,
    LocalPlacement,
    RayPlacement,
    ReplicatedModel,
    TorchrunPlacement,
)
from proxima.config.validate import check
from tests.refusals import refused

ROWS = {"model": {"path": "org/model"}, "task": "arithmetic"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "placement"),
    [
        ([], LocalPlacement()),
        (["placement=torchrun", "placement.timeout=60"], TorchrunPlacement(timeout=60.0)),
        (
            ["placement=ray", "placement.ranks=4", "placement.env={A: '1'}", "placement.sharding=replicate"],
            RayPlacement(ranks=4, env={"A": "1"}, sharding=ReplicatedModel()),
        ),
        (
            ["placement={kind: ray, sharding: {offload: true, param_dtype: bfloat16}}"],
            RayPlacement(sharding=FullSharding(offload=True, param_dtype="bfloat16")),
        ),
    ],
)
def test_every_spelling(recipe, overrides, placement):
    resolved = resolve(recipe(), overrides)
    assert resolved.config.placement == placement
    assert resolve(recipe(dump(resolved), "again.yaml")).config.placement == placement


@pytest.mark.parametrize("family", OFFLINE, ids=lambda family: family.name)
def test_runs_on_fixed_data_have_it_too(family):
    config = resolve(
        ROWS | {family.own: {"loss": ["sigmoid"]} if family.name == "dpo" else {}},
        ["placement={kind: ray, ranks: 3}"],
        root=family.root,
    ).config
    assert config.placement == RayPlacement(ranks=3)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"tensor_parallel": 3}, "tensor_parallel=3 must be a divisor of the 8 ranks; set it to 4"),
        ({"tensor_parallel": 4, "context_parallel": 4}, "context_parallel=4 must be a divisor of the 8 ranks over"),
        ({"expert_parallel": 16}, "expert_parallel=16 must be a divisor of the 8 ranks; set it to 8"),
        ({"expert_parallel": 2, "sharding": ReplicatedModel()}, "expert_parallel=2 splits experts, and sharding is"),
        ({"context_parallel": 0}, "context_parallel=0 must be >= 1"),
    ],
)
def test_groups_that_ranks_can_not_form(fields, message):
    assert refused(RayPlacement, ranks=8, **fields)[0].startswith(message)


@pytest.mark.parametrize(
    ("world", "node", "words", "reason"),
    [
        ("6", None, "tensor_parallel=4", "must be a divisor of the 6 ranks"),
        ("1", None, "context_parallel=2", "must be a divisor of the 1 rank;"),
        ("6", None, "tensor_parallel=3", "must divide the 4 attention heads"),
        ("6", None, "tensor_parallel=3 sharding=replicate", "must divide"),
        (None, None, "tensor_parallel=8", "must divide the 4 attention heads of model.path; se"),
        ("8", "2", "tensor_parallel=4 sharding=hybrid", "must be a divisor of the 2 ranks of a node; set it to 2"),
        ("6", None, "context_parallel=3 tensor_parallel=2 sharding=replicate", "must be at"),
        ("4", None, "tensor_parallel=2 context_parallel=2", None),
        (None, None, "tensor_parallel=2", None),
    ],
)
def test_what_is_known_of_ranks_and_model_is_checked(recipe, tiny_model, monkeypatch, world, node, words, reason):
    """A refusal names the first of the words."""
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", node)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    model = [f"model.path={tiny_model('llama')}", "sampling.max_tokens=8"]
    given = [*model, "placement.kind=torchrun", *(f"placement.{word}" for word in words.split())]
    problems = [str(problem) for problem in check(resolve(recipe(), given))]
    assert len(problems) == (reason is not None)
    assert all(text.startswith(f"placement.{words.split()[0]} (command line): {reason}") for text in problems)
