"""A model on 1, 2 and 4 processes computes what it computes in one."""

import pytest

from proxima.model import save
from tests.model.families import make
from tests.model.parallel.passes import all_passes
from tests.model.parallel.ranks import run_ranks


@pytest.mark.parametrize("size", [1, 4])
def test_forward_and_backward_are_those_of_one_process(size, tiny_model, tmp_path):
    for kind in ("llama", "qwen2", "gpt2"):
        (tmp_path / kind).symlink_to(tiny_model(kind))
    made = make("Qwen3-MoE")
    save(made.model, made.tokenizer, tmp_path / "experts")
    run_ranks(all_passes, size, tmp_path)
