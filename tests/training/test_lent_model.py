"""Servers get the weights of a sharded model without a whole copy of it on any rank."""

from typing import Any

import pytest

from tests.campaigns import campaign
from tests.model.parallel.passes import LORA
from tests.model.parallel.ranks import run_ranks
from tests.model.parallel.splits import write_models
from tests.training.lent_models import same_staged, troubles

HERE = "tests/training/test_lent_model.py::test_what_is_staged_is_that_of_a_whole_copy"
Case = tuple[int, str, dict[str, Any], str | None, dict[str, Any]]
CASES: list[Case] = [
    (2, "qwen2", {}, "bfloat16", {}),  # tied
    (2, "llama", {"tensor_parallel": 2}, None, {}),
    (2, "experts", {"expert_parallel": 2}, None, {}),
    (2, "llama", {}, None, {"lora": LORA}),
]
MORE: list[Case] = [
    (2, "llama", {"kind": "replicate"}, None, {}),
    (2, "qwen2", {"tensor_parallel": 2}, None, {}),
    (2, "llama", {"param_dtype": "bfloat16"}, None, {}),
    (4, "llama", {"tensor_parallel": 2}, "bfloat16", {}),
    (4, "experts", {"expert_parallel": 2, "kind": "hybrid"}, None, {}),
    (4, "sparse", {"expert_parallel": 2, "context_parallel": 2}, None, {}),
    (4, "qwen3", {"context_parallel": 2}, None, {}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name", "layout", "dtype", "settings"), [*CASES, *campaign(HERE, MORE)])
def test_what_is_staged_is_that_of_a_whole_copy(size, name, layout, dtype, settings, models, tmp_path):
    run_ranks(same_staged, size, models / name, tmp_path, layout, dtype, settings)


@pytest.mark.slow
def test_errors_of_rank_zero_leave_no_rank_waiting(models, tmp_path):
    run_ranks(troubles, 2, models / "qwen2", tmp_path)
