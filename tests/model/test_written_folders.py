"""The folder that is written is the folder that was read, but for what the run changed: its config field by field, its
other files byte for byte, and the weights that the run did not use."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from proxima.engine.http.weights.weight_folders import WeightFolders
from proxima.model.adapters.lora import Lora
from proxima.model.input_files import INDEX, left_out_note, left_out_of
from proxima.model.load import load, save, save_trained
from proxima.model.pretrained import load_tokenizer
from proxima.model.scalar_model import load_scalar_model
from proxima.model.written_settings import LAYERS, ROPE, _add_older_rope, write_config
from scripts.family_exports import SCALINGS
from tests.tiny import make_tiny, tiny_tokenizer

pytestmark = pytest.mark.slow

OLDER = {  # how llama and its kin were published before transformers 5
    "rope_theta": 500000.0,
    "rope_scaling": {**SCALINGS["llama3"]},
    "torch_dtype": "float32",
    "transformers_version": "4.51.0",
}
FAMILIES = {  # those whose positions have settings of their own → a field of their older format
    "cohere2": "rope_theta",
    "gemma3_text": "rope_local_base_freq",
    "glm4": "partial_rotary_factor",
    "gpt_neox": "rotary_emb_base",
    "llama": "rope_theta",
    "modernbert-decoder": "local_rope_theta",
    "nemotron": "partial_rotary_factor",
    "phi": "partial_rotary_factor",
    "phi3": "rope_theta",
    "qwen2": "rope_theta",
    "qwen3_next": "partial_rotary_factor",
    "stablelm": "partial_rotary_factor",
}


def fields(folder: Path, name: str = "config.json") -> dict:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a folder; where there is an index, it names exactly those of each file."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= (here := load_file(file))
        if (folder / INDEX).is_file():
            assert {name for name, place in fields(folder, INDEX)["weight_map"].items() if place == file.name} == set(
                here
            )
    return tensors


def older(folder: Path, **changes) -> Path:
    """A folder in the format of transformers 4."""
    make_tiny("llama", folder)
    config = {name: value for name, value in fields(folder).items() if name not in (ROPE, "dtype")} | OLDER | changes
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = fields(folder, "tokenizer_config.json") | {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer.pop("backend", None)
    tokenizer.pop("extra_special_tokens", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "vocab.txt").write_text("read by nobody here")
    return folder


def sees(folder: Path) -> Path:
    """A tiny Qwen3.5 as it is published: with a vision tower, and with layers that predict several tokens ahead."""
    text = {
        "vocab_size": 262,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "eos_token_id": 0,
        "tie_word_embeddings": True,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"patch_size": 16}')
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.randn(32, 64).bfloat16()
    tensors["mtp.layers.0.mlp.up_proj.weight"] = torch.randn(48, 32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def changed(before: dict, now: dict) -> set[str]:
    return {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_settings_of_the_input_are_kept(dtype, tmp_path):
    given = older(tmp_path / "given")
    loaded = load(str(given), device="cpu", dtype=dtype)
    shutil.move(given, given := tmp_path / "moved")
    written = save(loaded.model, loaded.tokenizer, tmp_path / "written")
    expected = set() if dtype == torch.float32 else {"torch_dtype"}
    assert changed(fields(given), fields(written)) == expected
    names = {file.name for file in given.iterdir()}
    assert names == {file.name for file in written.iterdir()}
    for name in names - {"config.json", "model.safetensors"}:
        assert (written / name).read_bytes() == (given / name).read_bytes(), name


def test_a_changed_tokenizer_and_changed_settings_are_written(tmp_path):
    loaded = load(str(older(tmp_path / "given")), device="cpu")
    loaded.tokenizer.chat_template = "{{ messages }}"
    loaded.model.generation_config.eos_token_id = [5, 0]
    loaded.model.config.bos_token_id = 7
    written = save(loaded.model, loaded.tokenizer, tmp_path / "written")
    again = load(str(written), device="cpu")
    assert again.tokenizer.chat_template == "{{ messages }}"
    assert again.model.generation_config.eos_token_id == [5, 0]
    assert changed(fields(tmp_path / "given"), fields(written)) == {"bos_token_id"}


def test_tokenizers_of_transformers_5_are_named_as_version_4_knows_them(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<a>"]})
    make_tiny("llama", tmp_path / "given")
    tokenizer.save_pretrained(tmp_path / "given")
    assert fields(tmp_path / "given", "tokenizer_config.json")["tokenizer_class"] == "TokenizersBackend"
    model = load(str(make_tiny("llama", tmp_path / "model")), device="cpu").model
    for folder in (
        save(model, tokenizer, tmp_path / "a"),
        save(model, load_tokenizer(str(tmp_path / "given")), tmp_path / "b"),
    ):
        written = fields(folder, "tokenizer_config.json")
        assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert not isinstance(written.get("extra_special_tokens"), list)
        again = AutoTokenizer.from_pretrained(folder)
        assert again("x <a>")["input_ids"] == tokenizer("x <a>")["input_ids"]
        assert again.extra_special_tokens == ["<a>"]


def test_a_scaling_of_phi_has_the_three_fields_that_version_4_takes():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
    config = CONFIG_MAPPING["phi3"](rope_parameters=rope, original_max_position_embeddings=2048)
    written = json.loads(config.to_json_string())
    _add_older_rope(config, written)
    assert written["rope_scaling"].keys() == {"type", "short_factor", "long_factor"}
    assert written["rope_theta"] == 10000.0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_older_names_of_positions_say_the_same(family):
    config = CONFIG_MAPPING[family]()
    for number, part in enumerate([config.rope_parameters, *config.rope_parameters.values()]):
        if isinstance(part, dict) and "rope_theta" in part:
            part["rope_theta"] = 700.0 + number
    written = json.loads(config.to_json_string())
    _add_older_rope(config, written)
    assert FAMILIES[family] in written
    both = type(config).from_dict(dict(written)).rope_parameters
    rope = written.pop(ROPE)
    assert type(config).from_dict(written).rope_parameters == both == rope


def test_no_older_names_where_they_would_be_read_as_something_else():
    config = CONFIG_MAPPING["gemma4_text"]()
    written = json.loads(config.to_json_string())
    before = dict(written)
    _add_older_rope(config, written)
    assert written == before


@pytest.mark.parametrize("family", LAYERS)
def test_kinds_of_layers_have_the_names_that_version_4_knows(family, tmp_path):
    kinds = ["linear_attention", "hybrid" if family == "zamba2" else "full_attention"]
    config = CONFIG_MAPPING[family](**{LAYERS[family]: kinds}, num_hidden_layers=2)
    with torch.device("meta"):
        write_config(AutoModelForCausalLM.from_config(config), tmp_path)
    written = fields(tmp_path)
    assert written[LAYERS[family]] == ["mamba", "hybrid" if family == "zamba2" else "attention"]
    assert getattr(type(config).from_dict(written), LAYERS[family]) == kinds


def test_experts_are_counted_under_both_names():
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING["qwen3_moe"](num_hidden_layers=0, num_experts=4, vocab_size=8, hidden_size=8)
    )
    with TemporaryDirectory() as folder:
        write_config(model, Path(folder))
        assert fields(Path(folder))["num_experts"] == fields(Path(folder))["num_local_experts"] == 4


def test_infinite_settings_are_written_as_version_4_reads_them(tmp_path):
    given = older(tmp_path / "given", time_step_limit=[0.0, {"__float__": "Infinity"}])
    loaded = load(str(given), device="cpu")
    written = save(loaded.model, loaded.tokenizer, tmp_path / "written")
    assert fields(written)["time_step_limit"] == [0.0, float("inf")]


def test_weights_that_a_text_run_does_not_use_are_written_as_they_were(tmp_path):
    given = sees(tmp_path / "given")
    before, settings = weights(given), fields(given)
    loaded = load(str(given), device="cpu")
    unused = loaded.model.input_files.unused
    assert {name.split(".")[1] for name in unused} == {"visual", "fc", "layers"}
    shutil.rmtree(given)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight.add_(1)
    written = save(loaded.model, loaded.tokenizer, tmp_path / "written")
    after = weights(written)
    assert after.keys() == before.keys()
    assert [name for name in after if not torch.equal(after[name], before[name])] == [
        "model.language_model.embed_tokens.weight"
    ]
    assert after["mtp.fc.weight"].dtype == torch.bfloat16
    assert changed(settings, fields(written)) <= {"torch_dtype", "text_config"}
    assert (written / "preprocessor_config.json").read_text() == '{"patch_size": 16}'
    whole = Qwen3_5ForConditionalGeneration.from_pretrained(written, output_loading_info=True)[1]
    assert not whole["missing_keys"]

    again = load(str(written), device="cpu")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(again.model(ids).logits, loaded.model(ids).logits)
    twice = save(again.model, again.tokenizer, tmp_path / "twice")
    assert {f.name: f.read_bytes() for f in written.iterdir()} == {f.name: f.read_bytes() for f in twice.iterdir()}


def test_adapters_and_servers_get_them_too(tmp_path):
    given = sees(tmp_path / "given")
    before = weights(given)
    adapted = load(str(given), device="cpu", lora=Lora(rank=2))
    folders = WeightFolders(tmp_path / "staged")
    for version in ("v1", "v2"):
        staged = folders.write(adapted.model, adapted.tokenizer, version)
        assert weights(staged).keys() == before.keys()
        assert fields(staged)["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    folders.close()

    adapter = save_trained(adapted, tmp_path / "adapter")
    merged = load(str(adapter), device="cpu")
    written = save(merged.model, merged.tokenizer, tmp_path / "merged")
    after = weights(written)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_a_scalar_model_has_its_own_settings(tmp_path):
    given = older(tmp_path / "given")
    scored = load_scalar_model(str(given), device="cpu", new_head=0.1)
    written = save(scored.model, scored.tokenizer, tmp_path / "scored")
    config = fields(written)
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["rope_theta"] == 500000.0 and config["rope_scaling"]["rope_type"] == "llama3"
    again = load_scalar_model(str(written), device="cpu")
    assert again.model.config.num_labels == 1
    assert again.model.config.rope_parameters == scored.model.config.rope_parameters


def test_weights_that_cannot_travel_are_named(tmp_path):
    given = make_tiny("llama", tmp_path / "given")
    tensors = load_file(given / "model.safetensors") | {"mtp.fc.weight": torch.ones(2, 2)}
    save_file(tensors, given / "model.safetensors", metadata={"format": "pt"})
    scored = load_scalar_model(str(given), device="cpu", new_head=0.1)
    assert left_out_of(scored.model) == ("mtp.fc.weight",)
    assert left_out_note(left_out_of(scored.model)).endswith("left out of what is written: mtp.fc.weight")

    (given / "model.safetensors").unlink()
    torch.save(tensors, given / "pytorch_model.bin")
    pickled = load(str(given), device="cpu")
    assert left_out_of(pickled.model) == ("mtp.fc.weight",)
    assert "mtp.fc.weight" not in weights(save(pickled.model, pickled.tokenizer, tmp_path / "written"))
    assert left_out_note(()) is None
