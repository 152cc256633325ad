"""Adapters on disk: what peft reads, what is bit-equal after a round trip, and what is refused in one line."""

import json
import shutil

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from proxima.data import FieldError
from proxima.model import files
from proxima.model.adapters.adapter_files import read_settings, save_adapter
from proxima.model.adapters.lora import Lora, adapter_names
from proxima.model.files import is_adapter, model_files
from proxima.model.load import load, save_trained
from proxima.model.pretrained import check_path, load_config, load_tokenizer
from tests.model.adapters import with_adapter
from tests.tiny import tiny

LORA = Lora(rank=4, alpha=8)


@pytest.fixture
def base(tiny_model, tmp_path):
    return shutil.copytree(tiny_model("llama"), tmp_path / "base")


@pytest.fixture
def adapter(base, tmp_path):
    adapted = with_adapter(base, LORA)
    return save_trained(adapted, tmp_path / "adapter")


def refusal(what, *arguments, **settings) -> str:
    with pytest.raises(FieldError) as caught:
        what(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [LORA, Lora(rank=4, alpha=8, dora=True, rslora=True)])
def test_a_round_trip_is_bit_equal_and_small(lora, base, tmp_path):
    adapted = with_adapter(base, lora)
    folder = save_trained(adapted, tmp_path / "adapter")
    back = load(str(base), lora=Lora(**{**vars(lora), "path": str(folder)}), device="cpu")
    for name in adapter_names(adapted.model):
        assert torch.equal(back.model.get_parameter(name), adapted.model.get_parameter(name)), name
    assert sorted(p.name for p in folder.iterdir()) == [
        *("adapter_config.json", "adapter_model.safetensors", "base.json", "chat_template.jinja"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    assert (
        save_trained(back, tmp_path / "again").joinpath("adapter_config.json").read_bytes()
        == (folder / "adapter_config.json").read_bytes()
    )


@pytest.mark.slow
def test_a_folder_with_an_adapter_is_a_model(adapter, base):
    """`load`, `load_config` and `load_tokenizer` take it as they take any other: the base with the adapter merged."""
    merged = load(str(adapter), device="cpu")
    assert is_adapter(str(adapter)) and merged.base is None and merged.name == "adapter"
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged.model(tokens).logits, theirs(tokens).logits, rtol=0, atol=2e-5)
    assert merged.parameters == sum(p.numel() for p in tiny("llama").parameters()) and merged.adapter_parameters == 0
    assert all(p.requires_grad for p in merged.model.parameters())
    assert load_config(str(adapter)).hidden_size == 32
    assert load_tokenizer(str(adapter)).chat_template == load_tokenizer(str(base)).chat_template
    for file in adapter.glob("*token*"):
        file.unlink()
    assert load_tokenizer(str(adapter)).eos_token_id == 0, "that of the base"


@pytest.mark.slow
def test_an_adapter_that_peft_wrote_is_taken(base, tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_dropout=0.1)
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = theirs(tokens).logits
        merged = load(str(tmp_path / "adapter"), device="cpu").model(tokens).logits
        lora = Lora(rank=2, alpha=8, targets=("q_proj", "down_proj"), path=str(tmp_path / "adapter"))
        going_on = load(str(base), lora=lora, device="cpu").model(tokens).logits
    torch.testing.assert_close(merged, expected, rtol=0, atol=2e-5)
    assert torch.equal(going_on, expected)


@pytest.mark.slow
def test_an_adapter_of_another_base_is_refused_by_name(adapter, base, tiny_model):
    other = tiny_model("llama", seed=1)
    lora = Lora(rank=4, alpha=8, path=str(adapter))
    assert refusal(load, str(other), lora=lora, device="cpu") == (
        f"model.lora.path={str(adapter)!r} was made for a different base than {other}: model.safetensors differs; "
        f"restore that file of {base}, or use an adapter made for this model"
    )
    (adapter / "base.json").unlink()  # one that peft wrote knows a name alone
    assert refusal(load, str(other), lora=lora, device="cpu") == (
        f"model.lora.path={str(adapter)!r} was made for {base}, and the model is {other}; "
        f"set model.path={base}; if both are one model, write its path into adapter_config.json"
    )


def test_a_base_that_changed_or_is_gone_is_refused(adapter, base):
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] += 1e-3
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    assert refusal(load, str(adapter), device="cpu") == (
        f"model.path={str(adapter)!r} was made for a different base than {base}: model.safetensors differs; "
        f"restore that file of {base}, or use an adapter made for this model"
    )
    shutil.rmtree(base)
    assert refusal(check_path, str(adapter)) == (
        f"model.path={str(adapter)!r} is an adapter of {base}, which does not exist; restore it, or write where it is "
        "as base_model_name_or_path into adapter_config.json"
    )
    assert refusal(load, str(adapter), device="cpu") == refusal(check_path, str(adapter))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "field"),
    [({"rank": 8, "alpha": 8}, "rank"), ({"rank": 4, "alpha": 9}, "alpha"), ({"rslora": True}, "rslora")],
)
def test_settings_of_an_adapter_to_start_from_are_its_own(settings, field, adapter, base):
    lora = Lora(**({"rank": 4, "alpha": 8, "path": str(adapter)} | settings))
    said = refusal(load, str(base), lora=lora, device="cpu")
    assert said.startswith(f"model.lora.{field}=") and str(adapter) in said and "; set it to " in said


@pytest.mark.slow
def test_matrices_that_do_not_fit_are_named(adapter, base):
    lora = Lora(rank=4, alpha=8, path=str(adapter), targets=("q_proj",))
    assert "(24 differences in all); set model.lora.targets" in refusal(load, str(base), lora=lora, device="cpu")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    save_file(tensors | {name: torch.full((4, 32), float("nan"))}, file)
    assert f"NaN or infinity in {name}" in refusal(load, str(adapter), device="cpu")
    save_file(tensors | {name: torch.zeros(4, 31)}, file)
    assert f"{name} of shape [4, 31], and this model needs [4, 32]" in refusal(load, str(adapter), device="cpu")
    file.write_bytes(file.read_bytes()[:100])
    assert "has adapter_model.safetensors, which is no whole safetensors file" in refusal(
        load, str(adapter), device="cpu"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern={'q_proj': 2}, which proxima does not support"),
        ({"modules_to_save": ["lm_head"]}, "also has the whole of lm_head; merge it"),
        ({"bias": "all"}, "has bias='all', which"),
        ({"exclude_modules": ["q_proj"]}, "has exclude_modules=['q_proj'], which are among its target_modules; merge"),
        ({"exclude_modules": ".*q_proj"}, "has exclude_modules='.*q_proj', which proxima does not support; merge it"),
        ({"of_tomorrow": 3}, "has of_tomorrow=3, which"),
        ({"init_lora_weights": "pissa"}, "changed its base when it was made (init_lora_weights='pissa')"),
        ({"lora_alpha": None}, "has r=4 and lora_alpha=None, which must be numbers"),
        ({"r": "4"}, "has r='4' and lora_alpha="),
        ({"target_modules": ".*q_proj"}, "has no list of target_modules, but '.*q_proj'"),
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path in adapter_config.json"),
    ],
)
def test_what_an_adapter_has_and_proxima_has_not_is_refused(changes, said, adapter):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert said in refusal(load, str(adapter), device="cpu")


@pytest.mark.slow
def test_other_adapters_and_odd_folders_are_refused(base, adapter, tmp_path):
    other = get_peft_model(AutoModelForCausalLM.from_pretrained(base), IA3Config(task_type="CAUSAL_LM"))
    other.save_pretrained(tmp_path / "ia3")
    assert "is an adapter of type IA3, not LORA; merge it with" in refusal(load, str(tmp_path / "ia3"), device="cpu")
    said = refusal(load, str(adapter), lora=LORA, device="cpu")
    assert said.endswith(f"set model.path={base} and model.lora.path={adapter}, or export the adapter merged")
    assert "is not an adapter" in refusal(load, str(base), lora=Lora(path=str(base)), device="cpu")
    shutil.copy(base / "model.safetensors", adapter)
    assert "has both an adapter (adapter_config.json) and a model (model.safetensors)" in refusal(
        check_path, str(adapter)
    )


def test_the_hashes_of_an_adapter_have_those_of_its_base(adapter, base, tiny_model):
    """A run on an adapter that peft wrote is another run when the base is another."""
    (adapter / "base.json").unlink()
    before = model_files(str(adapter))
    assert before["base model.safetensors"] == model_files(str(base))["model.safetensors"]
    shutil.copy(tiny_model("llama", seed=1) / "model.safetensors", base)
    after = model_files(str(adapter))
    assert {name for name in before if before[name] != after[name]} == {"base model.safetensors"}


def test_the_base_is_named_by_an_absolute_path(base, tmp_path, monkeypatch):
    monkeypatch.chdir(base.parent)
    adapted = load("base", lora=LORA, device="cpu")
    folder = save_adapter(adapted, tmp_path / "adapter")
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert json.loads((folder / "base.json").read_text())["dtype"] == "float32"


def test_settings_of_any_size_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_FILE", 100)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "note": "x" * 100}))
    with pytest.raises(FieldError, match="has no readable adapter_config.json .*more than 100 bytes"):
        read_settings(str(tmp_path), field_name="model.path")
