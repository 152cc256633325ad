"""Dimensions together: whole updates on four ranks, which split matrices, tokens and experts at once, against the same
on one process."""

import pytest

from tests.campaigns import campaign
from tests.model.parallel.ranks import run_ranks
from tests.training.shared_updates import SUM_LATER, same_joint_updates

T, C, E = "tensor_parallel", "context_parallel", "expert_parallel"
AGAIN = {"gradient_checkpointing": True}
BOTH = {T: 2, C: 2}
HYBRID = {"kind": "hybrid"}
CASES = [("sparse", "routes", {C: 2, E: 4}, {}), ("qwen3", "value head", BOTH, AGAIN)]
BREADTH = [
    ("sparse", "reward model", BOTH, {}),
    ("sparse", "routes", BOTH, AGAIN),
    ("sparse", "routes", {T: 2, **HYBRID}, {}),
    ("windows", "reward model", BOTH, {}),
    ("qwen2", "few tokens", {**BOTH, "offload": True}, AGAIN),
    ("heads", "few tokens", BOTH, {}),
    ("sparse", "routes", {C: 2, E: 2, **HYBRID}, AGAIN),
    ("sparse", "SFT", {E: 4}, {}),
    ("experts", "routes", BOTH, {}),
    ("experts", "routes", {C: 2, E: 2}, AGAIN),
    ("sparse", "routes", {C: 4, E: 2}, AGAIN),
    ("sparse", "routes", {**BOTH, "kind": "replicate"}, {}),
    ("sparse", "routes", {C: 2, E: 2, **SUM_LATER}, {}),
    ("qwen2", "critic", BOTH, AGAIN),
    ("qwen3", "reward model", {T: 2}, {}),
    ("sparse", "reward model", {E: 2}, AGAIN),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "trained", "layout", "settings"),
    [*CASES, *campaign("tests/model/parallel/test_joint.py::test_updates_are_those_of_one_process", BREADTH)],
)
def test_updates_are_those_of_one_process(model, trained, layout, settings, models):
    run_ranks(same_joint_updates, 4, models / "split" / model, trained, layout, settings)
