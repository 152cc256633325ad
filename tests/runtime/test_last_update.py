"""The last update of a run trains: no schedule has a learning rate of 0 there."""

import pytest
import torch
from safetensors.torch import load_file

from tests.runtime.tiny_run import saved_in


@pytest.mark.slow
@pytest.mark.parametrize("name", ["policy", "critic", "sft", "reward model", "dpo"])
def test_it_changes_the_weights(name, runs):
    *_, before, last = saved_in(runs.finished(name))
    files = [file.relative_to(last.path) for file in last.path.rglob("model.safetensors")]
    assert len(files) == 1 + (name == "critic")
    for file in files:
        first, second = (load_file(checkpoint.path / file) for checkpoint in (before, last))
        assert any(not torch.equal(first[key], second[key]) for key in first), file
