"""Weights that are copied from one safetensors file to another, a few bytes at a time."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from proxima.model import input_files
from proxima.model.input_files import copy_tensors, stored_tensors


@pytest.mark.parametrize("name", ["a" * length for length in range(1, 9)])
def test_a_copy_has_the_same_tensors_and_a_header_of_whole_words(name, tmp_path, monkeypatch):
    """Its length is a multiple of 8, as the format has it, whatever the names are."""
    monkeypatch.setattr(input_files, "CHUNK", 5)
    tensors = {
        name: torch.arange(7, dtype=torch.float32),
        "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "none": torch.empty(0, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "given.safetensors")
    with (tmp_path / "given.safetensors").open("rb") as file:
        stored = stored_tensors(file)
        copy_tensors({each: stored[each] for each in (name, "none", "b")}, tmp_path / "copy.safetensors")
    header = int.from_bytes((tmp_path / "copy.safetensors").read_bytes()[:8], "little")
    assert header % 8 == 0
    copied = load_file(tmp_path / "copy.safetensors")
    assert copied.keys() == tensors.keys()
    assert all(
        torch.equal(copied[each], tensors[each]) and copied[each].dtype == tensors[each].dtype for each in tensors
    )
