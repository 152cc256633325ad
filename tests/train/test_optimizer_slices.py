"""Tensors in blocks, in as many files as there were ranks."""

import json

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY

from proxima.train.optimizer_state import read_optimizer


def block(file, name: str, tensor: torch.Tensor, offset: list[int]) -> None:
    save_file({name: tensor}, file, metadata={CUSTOM_METADATA_KEY: json.dumps({name: {SAVED_OFFSETS_KEY: offset}})})


def test_blocks_of_a_folder_are_put_together(tmp_path):
    whole = torch.arange(35.0).view(7, 5)
    block(tmp_path / "shard-1.safetensors", "exp_avg/w", whole[:3].contiguous(), [0, 0])
    block(tmp_path / "shard-2.safetensors", "exp_avg/w", whole[3:, :2].contiguous(), [3, 0])
    block(tmp_path / "shard-3.safetensors", "exp_avg/w", whole[3:, 2:].contiguous(), [3, 2])
    save_file({"step/w": torch.tensor(4.0)}, tmp_path / "shard-4.safetensors")
    state = read_optimizer(tmp_path, {"w": torch.zeros(7, 5)})
    assert torch.equal(state["exp_avg/w"], whole) and state["exp_avg/w"].dtype == torch.float32
    assert torch.equal(state["step/w"], torch.tensor(4.0))
