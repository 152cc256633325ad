"""Experts split over ranks compute what one process computes."""

import copy
from types import SimpleNamespace

import pytest

from proxima.data import FieldError
from proxima.model import load, save
from proxima.model.parallel.experts import shard_experts
from proxima.model.parallel.mesh import Meshes
from proxima.model.parallel.sharding import Sharding
from tests.model.families import FAMILIES, make
from tests.model.parallel.expert_passes import all_loads, all_passes
from tests.model.parallel.ranks import run_ranks
from tests.tiny import tiny_tokenizer


def six_experts(folder) -> None:
    """Three for each of two ranks, which four ranks split by rows."""
    config = copy.deepcopy(FAMILIES["Qwen3-MoE"][1])
    config.num_experts = 6
    save(FAMILIES["Qwen3-MoE"][0](config), tiny_tokenizer(), folder / "six")


@pytest.mark.parametrize("size", [4])
def test_forward_and_backward_are_those_of_one_process(size, tiny_model, tmp_path):
    (tmp_path / "qwen3_moe").symlink_to(tiny_model("qwen3_moe"))
    made = make("Mixtral")
    save(made.model, made.tokenizer, tmp_path / "mixtral")
    six_experts(tmp_path)
    run_ranks(all_passes, size, tmp_path)


@pytest.mark.parametrize("size", [4])
def test_weights_of_the_files_and_back(size, tiny_model, tmp_path):
    (tmp_path / "qwen3_moe").symlink_to(tiny_model("qwen3_moe"))
    for name, family in (("mixtral", "Mixtral"), ("shared", "Qwen3-Next")):
        made = make(family)
        save(made.model, made.tokenizer, tmp_path / name)
    six_experts(tmp_path)
    run_ranks(all_loads, size, tmp_path)


@pytest.mark.parametrize(
    ("family", "ranks", "message"),
    [
        ("Llama", 2, "placement.expert_parallel=2 splits experts, and model.path has none; set it to 1"),
        ("Qwen3-MoE", 3, "placement.expert_parallel=3 must divide the 4 experts; set it to 4"),
        ("Mixtral", 8, "placement.expert_parallel=8 must divide the 4 experts; set it to 4"),
    ],
)
def test_a_model_whose_experts_can_not_be_split_is_refused_before_it_is_read(family, ranks, message, tmp_path):
    FAMILIES[family][1].save_pretrained(tmp_path)
    with pytest.raises(FieldError) as error:
        load(str(tmp_path), sharding=Sharding(expert_parallel=ranks))
    assert str(error.value) == message


def test_a_model_whose_experts_are_not_stacked_is_refused(tmp_path):
    model = make("DeepSeek-V3").model  # so small that all its layers are dense
    meshes = Meshes(shards=None, expert=SimpleNamespace(size=lambda: 2))
    with pytest.raises(FieldError, match="expert_parallel=2 has no plan"):
        shard_experts(model, meshes, Sharding(expert_parallel=2), {})
