"""Checkpoints of many ranks: bit-equal on any other number, a regular folder, and nothing that is unpickled."""

import json

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from proxima.model import load, save
from proxima.train.checkpoint import checkpoints, write_checkpoint, write_tensors
from proxima.train.checkpoint_restore import damage
from tests.model.families import make
from tests.model.parallel.ranks import run_ranks
from tests.train.saves import (
    expert_stack,
    first_saves,
    killed_while_it_writes,
    later_loads,
    loads_of_experts,
    restore_all,
    same_state,
    saves_of_experts,
)


def test_saved_on_two_loaded_on_one_and_four_and_back(tiny_model, tmp_path):
    (tmp_path / "qwen2").symlink_to(tiny_model("qwen2"))
    made = make("Qwen3-MoE")
    save(made.model, made.tokenizer, tmp_path / "experts")
    run_ranks(first_saves, 2, tmp_path)
    expected = load_file(tmp_path / "expected.safetensors")
    for name in ("by two", "by thread"):
        again = restore_all(tmp_path, tmp_path / name, None)
        same_state(again, expected)
    folder = tmp_path / "by one"
    folder.mkdir()
    policy, critic, adapter = (again[name] for name in ("policy", "critic", "adapter"))
    files = {"value_head.safetensors": lambda path: write_tensors(path, policy.model.value_head.state_dict())}
    write_checkpoint(folder, 1, policy.model.loaded, policy, {}, files, {"critic": critic})
    write_checkpoint(folder, 2, adapter.model.loaded, adapter, {})
    run_ranks(later_loads, 4, tmp_path)
    for name in ("by four", "by hybrid"):
        same_state(restore_all(tmp_path, tmp_path / name, None), expected)
    regular_folders(tmp_path)
    names_of_the_files(tmp_path)


def names_of_the_files(folder) -> None:
    """A model that transformers converts as it loads it is written with the names of the files that it came from."""
    written = sorted((folder / "000005" / "model").glob("*.safetensors"))
    ours = {name: tensor for file in written for name, tensor in load_file(file).items()}
    theirs = load_file(folder / "experts" / "model.safetensors")
    assert len(written) > 1 and ours.keys() == theirs.keys()
    assert all(ours[name].shape == tensor.shape for name, tensor in theirs.items())
    loaded = load(str(folder / "000005" / "model"), device="cpu")
    assert not torch.equal(loaded.model.lm_head.weight, theirs["lm_head.weight"])


def test_experts_on_ranks_that_split_them_and_on_others(tiny_model, tmp_path):
    (tmp_path / "qwen3_moe").symlink_to(tiny_model("qwen3_moe"))
    run_ranks(saves_of_experts, 4, tmp_path)
    expected = load_file(tmp_path / "expected.safetensors")
    names = load_file(tmp_path / "qwen3_moe" / "model.safetensors").keys()
    for name in ("two", "none", "four", "hybrid"):
        again = expert_stack(tmp_path, None, tmp_path / f"by {name}")
        same_state(again, expected)
        written = sorted((tmp_path / f"by {name}" / "000001" / "model").glob("*.safetensors"))
        assert len(written) > 1 and {key for file in written for key in load_file(file)} == names
        assert damage(tmp_path / f"by {name}" / "000001") is None
    (tmp_path / "by one").mkdir()
    write_checkpoint(tmp_path / "by one", 1, again["policy"].model.loaded, again["policy"], {})
    run_ranks(loads_of_experts, 2, tmp_path)


def test_a_rank_that_is_killed_while_it_writes_costs_that_checkpoint_alone(tiny_model, tmp_path):
    (tmp_path / "qwen2").symlink_to(tiny_model("qwen2"))
    run_ranks(killed_while_it_writes, 2, tmp_path, [0, -9])


def regular_folders(folder) -> None:
    """Of many ranks as of one, but for the names of the files with weights."""
    by_two, by_one = folder / "by two", folder / "by one"
    for checkpoint in checkpoints(by_two):
        assert damage(checkpoint.path) is None
        names = {str(path.relative_to(checkpoint.path)) for path in checkpoint.path.rglob("*") if path.is_file()}
        assert {name.rpartition(".")[2] for name in names} <= {"json", "safetensors", "jinja", "txt"}, names
        assert set(checkpoint.facts["crc32"]) == names - {"state.json"}
    assert checkpoints(by_two)[0].facts["version"] == 7
    assert (by_two / "000001" / "note.txt").read_text() == "of rank 0"
    for place in ("000001/model", "000001/critic", "000002/model"):
        ours, theirs = ({p.name for p in (root / place).iterdir()} for root in (by_two, by_one))
        weights = {name for name in ours | theirs if name.startswith("model")}
        assert ours - weights == theirs - weights
        for name in ours - weights:
            assert (by_two / place / name).read_bytes() == (by_one / place / name).read_bytes(), name
    kinds = {"model": AutoModelForCausalLM, "critic": AutoModelForSequenceClassification}
    for name, kind in kinds.items():
        models = [kind.from_pretrained(root / "000001" / name, dtype="auto") for root in (by_two, by_one)]
        for (key, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype, key
    index = json.loads((by_two / "000001/model/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model-00001-of-00001.safetensors"}
