"""Weights that each rank reads by itself are those of the files, bit for bit."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from proxima.data import FieldError
from proxima.model import load
from proxima.model.parallel.sharding import Sharding
from tests.model.parallel.loads import all_loads
from tests.model.parallel.ranks import run_ranks
from tests.tiny import tiny, tiny_tokenizer


@pytest.mark.parametrize("size", [4])
def test_sliced_and_gathered_weights_are_those_of_the_files(size, tiny_model, tmp_path):
    for kind in ("llama", "qwen2", "qwen3", "gpt2"):
        (tmp_path / kind).symlink_to(tiny_model(kind))
    tiny("qwen2").save_pretrained(tmp_path / "many files", max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(tmp_path / "many files")
    assert len(list((tmp_path / "many files").glob("*.safetensors"))) > 2
    for broken in ("lacks", "not finite"):
        shutil.copytree(tiny_model("qwen2"), tmp_path / broken)
        weights = load_file(tmp_path / broken / "model.safetensors")
        if broken == "lacks":
            del weights["model.norm.weight"]
        else:
            weights["model.layers.1.mlp.up_proj.weight"][-1, 3] = torch.nan
        save_file(weights, tmp_path / broken / "model.safetensors", metadata={"format": "pt"})
    run_ranks(all_loads, size, tmp_path)


def test_a_damaged_file_is_told_as_one_process_tells_it(tiny_model, tmp_path):
    shutil.copytree(tiny_model("llama"), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"damaged")
    for sharding in (None, Sharding()):
        with pytest.raises(FieldError, match=r"model\.path='.*/model' can't be loaded: "):
            load(str(tmp_path / "model"), device="cpu", sharding=sharding)
