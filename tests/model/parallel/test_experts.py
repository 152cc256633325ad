"""Experts split over ranks compute what one process computes."""

import pytest

from tests.model.parallel.expert_passes import all_passes
from tests.model.parallel.ranks import run_ranks


@pytest.mark.parametrize("size", [2, 4])
def test_forward_and_backward_are_those_of_one_process(size, tiny_model, tmp_path):
    (tmp_path / "qwen3_moe").symlink_to(tiny_model("qwen3_moe"))
    run_ranks(all_passes, size, tmp_path)
