"""Ids without a row in the embedding are refused before any weight is read; two matrices are exported as two."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from proxima.config.resolution import resolve
from proxima.config.validate import check
from proxima.data import FieldError
from proxima.model.adapters.lora import Lora, attach, merge_adapter
from proxima.model.load import load, save
from proxima.model.pretrained import UnloadedModel, load_tokenizer
from proxima.model.scalar_model import load_scalar_model
from proxima.reward.model_reward import ModelReward
from tests.tiny import VOCABULARY, tiny, tiny_tokenizer

SIZES = f"has a tokenizer of {VOCABULARY + 2} ids and an embedding of {VOCABULARY} rows: 2 tokens, from '<extra0>', "
SIZES += f"id {VOCABULARY}, to id {VOCABULARY + 1}, have none; resize the embedding"


def extended(folder: Path, count: int) -> Path:
    """The tokenizer of a model's folder gets more tokens; the weights are removed."""
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_tokens([f"<extra{i}>" for i in range(count)])
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture
def larger(tmp_path, tiny_model):
    folder = tmp_path / "model"
    loaded = load(str(tiny_model("llama")))
    return extended(save(loaded.model, loaded.tokenizer, folder), 2)


@pytest.mark.parametrize("read", [load, load_scalar_model, UnloadedModel.read])
def test_ids_without_a_row_are_refused_before_the_weights_are_read(larger, read):
    more = {"new_head": 0.0} if read is load_scalar_model else {}
    with pytest.raises(FieldError) as raised:
        read(str(larger), **more)
    assert str(raised.value).startswith(f"model.path='{larger}' {SIZES}")


def test_a_reward_model_with_such_ids_is_refused_by_its_check(tmp_path, tiny_model):
    loaded = load_scalar_model(str(tiny_model("llama")), new_head=0.0)
    folder = extended(save(loaded.model, loaded.tokenizer, tmp_path / "scorer"), 2)
    with pytest.raises(FieldError) as raised:
        ModelReward(path=str(folder)).check()
    assert str(raised.value).startswith(f"path='{folder}' {SIZES}")


def test_explain_refuses_them_too(larger):
    problems = [str(problem) for problem in check(resolve("quickstart", [f"model.path={larger}"], root=None))]
    assert any(SIZES in problem for problem in problems)


def test_a_padded_vocabulary_is_fine(tmp_path):
    model = tiny("llama")
    model.resize_token_embeddings(VOCABULARY + 5)
    folder = save(model, tiny_tokenizer(), tmp_path)
    assert load(str(folder)).model.config.vocab_size == VOCABULARY + 5
    assert not [str(p) for p in check(resolve("quickstart", [f"model.path={folder}"], root=None)) if "rows" in str(p)]


def reloaded(folder: Path) -> torch.Tensor:
    """Logits by transformers, which is told what the config says."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 20)[None]).logits


def test_an_adapter_of_a_tied_head_is_exported_as_two_matrices(tmp_path):
    model = tiny("llama")
    assert model.config.tie_word_embeddings
    attach(model, Lora(rank=2, targets=("lm_head", "q_proj")), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
        expected = model(input_ids=torch.arange(3, 20)[None]).logits
    merge_adapter(model)
    save(model, None, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    assert (reloaded(tmp_path) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_file_with_two_matrices_below_a_tied_config_stays_so(tmp_path, tiny_model):
    """As others merge such an adapter: the config says tied, and the file holds both."""
    source = load(str(tiny_model("llama")))
    model = source.model
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
    model.save_pretrained(tmp_path / "both")
    source.tokenizer.save_pretrained(tmp_path / "both")
    config = json.loads((tmp_path / "both" / "config.json").read_text())
    (tmp_path / "both" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    loaded = load(str(tmp_path / "both"))
    save(loaded.model, loaded.tokenizer, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(reloaded(tmp_path / "out"), reloaded(tmp_path / "both"))
