"""Experts split over ranks compute what one process computes."""

import pytest

from proxima.model import save
from tests.model.families import make
from tests.model.parallel.expert_passes import all_loads, all_passes
from tests.model.parallel.ranks import run_ranks


@pytest.mark.parametrize("size", [2, 4])
def test_forward_and_backward_are_those_of_one_process(size, tiny_model, tmp_path):
    (tmp_path / "qwen3_moe").symlink_to(tiny_model("qwen3_moe"))
    run_ranks(all_passes, size, tmp_path)


@pytest.mark.parametrize("size", [2, 4])
def test_weights_of_the_files_and_back(size, tiny_model, tmp_path):
    (tmp_path / "qwen3_moe").symlink_to(tiny_model("qwen3_moe"))
    for name, family in (("mixtral", "Mixtral"), ("shared", "Qwen3-Next")):
        made = make(family)
        save(made.model, made.tokenizer, tmp_path / name)
    run_ranks(all_loads, size, tmp_path)
