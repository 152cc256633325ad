"""The models of the ranks, written once."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from proxima.model.load import save
from tests.model.families import FAMILIES, make
from tests.model.parallel.splits import write_models
from tests.tiny import tiny, tiny_tokenizer


@pytest.fixture(scope="session")
def models(tmp_path_factory, tiny_model) -> Path:
    """Tiny models, whole and broken ones; those whose matrices can be split are in `split`."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("llama", "qwen2", "qwen3", "gpt2", "qwen3_moe"):
        (folder / kind).symlink_to(tiny_model(kind))
    families = {"windows": "Mistral", "experts": "Qwen3-MoE", "mixtral": "Mixtral", "shared": "Qwen3-Next"}
    for name, family in families.items():
        made = make(family)
        save(made.model, made.tokenizer, folder / name)
    write_models(folder / "split")
    sparse = folder / "split" / "sparse" / "model.safetensors"
    weights = load_file(sparse) | {"mtp.fc.weight": torch.ones(3, 2, dtype=torch.bfloat16)}  # which no rank uses
    save_file(weights, sparse, metadata={"format": "pt"})
    six = copy.deepcopy(FAMILIES["Qwen3-MoE"][1])
    six.num_experts = 6  # three for each of two ranks, which four ranks split by rows
    save(FAMILIES["Qwen3-MoE"][0](six), tiny_tokenizer(), folder / "six")
    tiny("qwen2").save_pretrained(folder / "many files", max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(folder / "many files")
    assert len(list((folder / "many files").glob("*.safetensors"))) > 2
    for broken in ("lacks", "not finite"):
        shutil.copytree(tiny_model("qwen2"), folder / broken)
        weights = load_file(folder / broken / "model.safetensors")
        if broken == "lacks":
            del weights["model.norm.weight"]
        else:
            weights["model.layers.1.mlp.up_proj.weight"][-1, 3] = torch.nan
        save_file(weights, folder / broken / "model.safetensors", metadata={"format": "pt"})
    return folder
