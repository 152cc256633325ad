"""What is exported is the same model for an older transformers, which PROXIMA_OLD_TRANSFORMERS names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from proxima.model.adapters.lora import Lora
from proxima.model.load import load, save, save_trained
from proxima.model.scalar_model import load_scalar_model
from scripts import family_exports, family_sweep
from tests.tiny import tiny_tokenizer

LARGEST = 1e-5  # nats
ADDED = {  # the older names of fields that the input had under the newer ones alone
    *("global_rope_theta", "local_rope_theta", "partial_rotary_factor", "rope_local_base_freq", "rope_scaling"),
    *("layer_types", "layers_block_type", "num_experts", "rope_theta", "rotary_emb_base", "rotary_pct"),
    *("time_step_limit", "torch_dtype"),
}
# types whose config says that embedding and head are one matrix, whose class has two, and whose export says so
UNTIED = {"bigbird_pegasus", "cpmant"}
READER = """
import json, sys, warnings
warnings.filterwarnings("ignore")
import torch, transformers
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
transformers.logging.set_verbosity_error()
assert transformers.__version__ < "5"
folder, base, scalar = sys.argv[1:]
AutoTokenizer.from_pretrained(folder)
settings = {"dtype": torch.float32}
kind = AutoModelForCausalLM
if scalar == "True":
    kind = AutoModelForSequenceClassification
    settings["config"] = AutoConfig.from_pretrained(folder)
model, said = kind.from_pretrained(base or folder, output_loading_info=True, **settings)
if base:
    model = PeftModel.from_pretrained(model, folder)
else:
    assert not any(said.values()), said
ids = torch.tensor([list(range(3, 60)), list(range(4, 61))])
with torch.no_grad():
    print(json.dumps(model.eval()(input_ids=ids, use_cache=False).logits.tolist()))
"""


@pytest.mark.campaign("tests/model/test_written_folders.py::test_the_older_names_of_positions_say_the_same")
@pytest.mark.skipif(family_exports.OLD not in os.environ, reason="needs a folder with an older transformers")
def test_exports_of_every_type_are_read_by_an_older_transformers():
    old = Path(os.environ[family_exports.OLD])
    swept = list(family_exports.swept(family_sweep.types(), old))
    rows = {row["name"]: row for row in swept if "built" not in row}
    assert len(rows) >= 130
    errors = {name: row["error"] for name, row in rows.items() if "error" in row}
    assert errors.keys() == family_exports.UNREADABLE.keys(), errors
    for name, said in family_exports.UNREADABLE.items():
        assert said in errors[name]
    more = {name: set(row["changed"]) - ADDED for name, row in rows.items()}
    assert {name for name, fields in more.items() if "tie_word_embeddings" in fields} == UNTIED
    rest = {name: fields - {"tie_word_embeddings"} for name, fields in more.items()}
    assert {name: fields for name, fields in rest.items() if fields} == {"fuyu": {"hidden_size"}}
    wrong = {name for name, row in rows.items() if row.get("nats", 0) > LARGEST}
    assert wrong == family_exports.DIFFERENT.keys()
    for name, difference in family_exports.DIFFERENT.items():
        row = rows[name]
        assert row["nats"] == pytest.approx(difference.nats, rel=0.5), name
        assert row["own"] > LARGEST, f"{name}: no difference of the versions' own"
        assert rows[difference.alike]["nats"] <= LARGEST, difference.alike


@pytest.fixture(params=["llama-llama3", "qwen3", "phi3"])
def exported(request, tmp_path) -> Path:
    """A folder that both versions read as the same model."""
    variants = dict(family_exports.models(request.param.partition("-")[0]))
    model = variants[request.param]
    model.resize_token_embeddings(len(tiny_tokenizer()))
    family_exports.export(model, tmp_path / "exported")
    return tmp_path / "exported"


def differ(folder: Path, model: torch.nn.Module, *, base: Path | None = None, scalar: bool = False) -> float:
    """How far the outputs of a model are from those that the older version gives for its folder."""
    ids = torch.tensor([list(range(3, 60)), list(range(4, 61))])
    with torch.no_grad():
        expected = model.eval()(input_ids=ids, use_cache=False).logits
    command = [sys.executable, "-c", READER, str(folder), str(base or ""), str(scalar)]
    environment = family_exports.environment(Path(os.environ[family_exports.OLD]))
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    given = torch.tensor(json.loads(ran.stdout.splitlines()[-1]))
    assert given.shape == expected.shape and expected.std() > 0
    return float((given - expected).abs().max())


def draw(model: torch.nn.Module) -> None:
    """Give the trained matrices values that matter."""
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.1)


@pytest.mark.campaign("tests/model/test_written_folders.py::test_adapters_and_servers_get_them_too")
@pytest.mark.skipif(family_exports.OLD not in os.environ, reason="needs a folder with an older transformers")
def test_an_adapter_is_read_by_an_older_peft(exported, tmp_path):
    adapted = load(str(exported), device="cpu", lora=Lora(rank=2))
    draw(adapted.model)
    folder = save_trained(adapted, tmp_path / "adapter")
    assert differ(folder, adapted.model, base=exported) <= LARGEST

    merged = load(str(folder), device="cpu")
    assert differ(save(merged.model, merged.tokenizer, tmp_path / "merged"), merged.model) <= LARGEST


@pytest.mark.campaign("tests/model/test_written_folders.py::test_a_scalar_model_has_its_own_settings")
@pytest.mark.skipif(family_exports.OLD not in os.environ, reason="needs a folder with an older transformers")
def test_reward_models_and_critics_are_read_by_an_older_transformers(exported, tmp_path):
    given = f"{exported}-input"  # whose positions only version 5 finds
    scored = load_scalar_model(given, device="cpu", new_head=0.3)
    draw(scored.model)
    folder = save(scored.model, tiny_tokenizer(), tmp_path / "scored")
    alone = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert differ(folder, alone, scalar=True) <= LARGEST

    critic = load_scalar_model(str(exported), device="cpu", new_head=0.3, lora=Lora(rank=2))
    draw(critic.model)
    adapter = save_trained(critic, tmp_path / "adapter")
    merged = load_scalar_model(str(adapter), device="cpu")
    assert differ(adapter, merged.model, base=exported, scalar=True) <= LARGEST
