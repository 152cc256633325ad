"""Checkpoints of many ranks: bit-equal on any other number, a regular folder, and nothing that is unpickled."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from proxima.model.load import load
from proxima.training.checkpoint import checkpoints
from tests.campaigns import campaign
from tests.model.parallel.ranks import run_ranks
from tests.model.parallel.saves import failures, killed_while_it_writes, moves

pytestmark = pytest.mark.slow

HYBRID = {"kind": "hybrid"}
OFFLOAD, REPLICATE = {"offload": True}, {"kind": "replicate"}
T2, T4, C2 = {"tensor_parallel": 2}, {"tensor_parallel": 4}, {"context_parallel": 2}
E2, E4 = {"expert_parallel": 2}, {"expert_parallel": 4}


@pytest.mark.parametrize(
    "four",
    [False, *campaign("tests/model/parallel/test_checkpoints.py::test_saved_on_two_loaded_on_one_and_back", [True])],
)
def test_saved_on_two_loaded_on_one_and_back(four, models, tmp_path):
    kinds = ("policy", "critic", "adapter")
    run_ranks(moves, 2, models, tmp_path, "qwen2", kinds, ({}, None))
    if four:
        run_ranks(moves, 4, models, tmp_path, "qwen2", kinds, (OFFLOAD | HYBRID | C2,))
        run_ranks(moves, 2, models, tmp_path, "qwen2", kinds, ({},))
    regular_folders(tmp_path / "0", tmp_path / "1")


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("split/sparse", (T2, None)),
        *campaign(
            "tests/model/parallel/test_checkpoints.py::test_ranks_that_split_matrices_tokens_and_experts_and_others",
            [
                ("split/sparse", (T2, None, T2 | C2)),
                ("split/qwen2", (T2, {}, T4, None, T2)),
                ("split/qwen2", (T2 | C2, None, T2 | C2 | REPLICATE, T2 | C2)),
                ("split/sparse", (T2, T2 | C2, None, C2 | E2, T4)),
                ("qwen3_moe", (E2, {}, E4 | OFFLOAD, HYBRID | E2, None)),
            ],
        ),
    ],
)
def test_ranks_that_split_matrices_tokens_and_experts_and_others(model, layouts, models, tmp_path):
    """Of a model that transformers converts as it loads it, files have the names of the files that it came from."""
    run_ranks(moves, 4, models, tmp_path, model, ("policy",), layouts)
    if model == "qwen3_moe":
        run_ranks(moves, 2, models, tmp_path, model, ("policy",), (E2,))
    names = load_file(models / model / "model.safetensors").keys()
    for number in range(len(layouts)):
        written = sorted((tmp_path / str(number) / "000001" / "model").glob("*.safetensors"))
        assert {key for file in written for key in load_file(file)} == names
        trained = len(written) - ("mtp.fc.weight" in names)  # which has a file of its own
        assert (trained > 1) == (number > 0 and layouts[number] is not None)
    loaded = load(str(tmp_path / "1" / "000001" / "model"), device="cpu")
    assert not torch.equal(loaded.model.model.norm.weight, load(str(models / model)).model.model.norm.weight)


def test_a_failure_of_one_rank_is_every_ranks(models, tmp_path):
    run_ranks(failures, 2, models, tmp_path)


def test_a_rank_that_is_killed_while_it_writes_costs_that_checkpoint_alone(models, tmp_path):
    run_ranks(killed_while_it_writes, 2, models, tmp_path, codes=[0, -9])


def regular_folders(by_two, by_one) -> None:
    """Of many ranks as of one, but for the names of the files with weights."""
    for checkpoint in checkpoints(by_two):
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
