"""Every kind of optimizer on ranks and over checkpoints: the state is the same whoever holds it."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from proxima.model import save
from proxima.train import AdamW
from proxima.train.optimizer_step import WeightwiseOptimizer
from tests.campaigns import campaign
from tests.model.parallel.ranks import run_ranks
from tests.model.parallel.saves import moves
from tests.tiny import VOCABULARY, tiny_tokenizer
from tests.train.optimizer_ranks import slices, specs, stepped


def test_slices_step_as_on_one_process(tmp_path):
    run_ranks(slices, 4, tmp_path)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Rows that have blocks of 8-bit moments."""
    folder = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    torch.manual_seed(0)
    save(Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, **sizes, **heads)), tiny_tokenizer(), folder / "qwen2")
    return folder


@pytest.mark.parametrize(
    "kind",
    [
        "muon",
        "adamw_8bit",
        *campaign("tests/train/test_optimizer_step.py::test_a_checkpoint_goes_to_any_number_of_ranks", ["offload"]),
    ],
)
def test_a_checkpoint_goes_to_any_number_of_ranks(kind, wide, tmp_path):
    if kind not in specs():
        pytest.skip("torchao is not installed")
    run_ranks(moves, 2, wide, tmp_path, "qwen2", ("policy",), ({}, None, {}), kind)
    of_four = ({"kind": "hybrid"}, {})[: 1 + (kind == "muon")]
    run_ranks(moves, 4, wide, tmp_path, "qwen2", ("policy",), of_four, kind)


def test_moments_in_host_memory_change_no_bit():
    settings = {"lr": 1e-2, "weight_decay": 0.1, "beta2": 0.95}
    (here, plain), (there, host) = (stepped(AdamW(**settings, offload=on)) for on in (False, True))
    assert isinstance(host, WeightwiseOptimizer) and isinstance(plain, torch.optim.AdamW)
    for name, weight in here.items():
        assert torch.equal(weight, there[name])
        ours, theirs = host.state[there[name]], plain.state[weight]
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
