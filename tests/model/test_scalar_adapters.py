"""Adapters of scalar models: the head is trained and kept whole beside them."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification

from proxima.data import FieldError
from proxima.model.adapters.lora import Lora, adapter_off
from proxima.model.load import load, save, save_trained
from proxima.model.pretrained import LoadedModel
from proxima.model.scalar_model import ScalarModel, load_scalar_model, score_normalization, set_score_normalization
from tests.model.adapters import move
from tests.model.rows import MIXED, rows

pytestmark = pytest.mark.slow

LORA = Lora(rank=4, alpha=8)


def scalar(folder, lora: Lora | None = LORA, *, moved: bool = True) -> LoadedModel:
    loaded = load_scalar_model(str(folder), device="cpu", new_head=0.3, seed=5, lora=lora)
    if moved:
        move(loaded)
    return loaded


def values(loaded: LoadedModel) -> torch.Tensor:
    model = ScalarModel(loaded)
    with torch.no_grad():
        return model.values(model.pack(rows(*MIXED)))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_the_decoder_gets_adapters_and_the_head_is_trained(kind, tiny_model):
    adapted, plain = scalar(tiny_model(kind)), scalar(tiny_model(kind), None, moved=False)
    assert torch.equal(values(scalar(tiny_model(kind), moved=False)), values(plain)), "it starts as the plain model"
    assert not torch.allclose(values(adapted), values(plain), atol=0.01)
    with adapter_off(adapted.model):
        assert torch.equal(values(adapted), values(plain))
    model = ScalarModel(adapted)
    model.values(model.pack(rows(*MIXED))).sum().backward()
    trained = {name for name, p in adapted.model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert "score.weight" in trained and all("lora" in name or name == "score.weight" for name in trained)
    assert trained == {name for name, p in adapted.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_folder_is_a_scalar_model_for_us_and_for_peft(kind, tiny_model, tmp_path):
    adapted = scalar(tiny_model(kind))
    set_score_normalization(adapted.model.config, 0.5, 2.0)
    folder = save_trained(adapted, tmp_path / "adapter")
    expected = values(adapted)
    assert not list(folder.glob("model*.safetensors"))
    merged = load_scalar_model(str(folder), device="cpu")
    torch.testing.assert_close(values(merged), expected, rtol=0, atol=2e-5)
    assert score_normalization(merged.model.config) == (0.5, 2.0)
    again = scalar(tiny_model(kind), Lora(rank=4, alpha=8, path=str(folder)), moved=False)
    assert torch.equal(values(again), expected) and score_normalization(again.model.config) == (0.5, 2.0)
    files = [save_trained(x, tmp_path / name) for x, name in ((adapted, "a"), (again, "b"))]
    for file in files[0].iterdir():
        assert file.read_bytes() == (files[1] / file.name).read_bytes(), file.name
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model(kind), num_labels=1)
    theirs = PeftModel.from_pretrained(base, folder)
    row = rows((7, (9,)))[0]
    tokens = torch.tensor([*row.prompt_tokens, *row.tokens])[None]
    pad = merged.model.config.pad_token_id
    theirs.config.pad_token_id = base.config.pad_token_id = pad
    with torch.no_grad():
        score = theirs(tokens).logits
        save(merged.model, merged.tokenizer, tmp_path / "merged")
        plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(plain(tokens).logits, score, rtol=0, atol=2e-5)


def test_adapters_of_policies_and_of_scalar_models_are_not_mixed_up(tiny_model, tmp_path):
    of_policy = save_trained(load(str(tiny_model("llama")), lora=LORA, device="cpu"), tmp_path / "policy")
    of_scalar = save_trained(scalar(tiny_model("llama")), tmp_path / "scalar")
    with pytest.raises(FieldError, match="has no scalar head|is an adapter without a scalar head"):
        load_scalar_model(str(of_policy), device="cpu")
    with pytest.raises(FieldError, match="is an adapter without a scalar head; give one of a reward model"):
        scalar(tiny_model("llama"), Lora(rank=4, alpha=8, path=str(of_policy)))
    with pytest.raises(FieldError, match="also has the whole of score"):
        load(str(of_scalar), device="cpu")
    with pytest.raises(FieldError, match="'score' is not a linear layer"):
        scalar(tiny_model("llama"), Lora(targets=("score",)))
