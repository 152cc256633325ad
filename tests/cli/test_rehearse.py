"""`proxima rehearse`: does a step fit devices that are not here?"""

import json
from pathlib import Path

import pytest
from transformers import Qwen3Config

from proxima.config import resolve
from proxima.data import UserError

pytestmark = pytest.mark.usefixtures("warm_rehearsals")
ROOT = Path(__file__).resolve().parents[2]


def test_it_fits_and_says_what_waits(proxima, recipe):
    code, out, err = proxima("rehearse", recipe(), "--devices", "H100-80G")
    assert (code, err) == (0, "")
    assert "fits: 1.0 GiB of 79.2 GiB on each of 1xH100-80G" in out
    assert "0 inside" in out and "train/shared_update.py:" in out
    assert "counted in the step: 0.0 GiB; the formula of `proxima explain`, which knows neither" in out
    parts = dict(part.rsplit(" ", 1) for part in out.splitlines()[1].strip().split("  "))
    assert parts["CUDA itself"] == "1.00" and "fragments" in parts
    assert sum(map(float, parts.values())) == pytest.approx(1.0, abs=0.05)


def test_the_demo_s_model_is_downloaded(proxima, here, monkeypatch):
    def download(folder):
        raise UserError(f"asked for {folder}")

    monkeypatch.setattr("proxima.model.demo_model.download_demo_model", download)
    assert proxima("rehearse", "quickstart") == (2, "", "error: asked for models/smollm2-135m-instruct\n")


def test_a_model_too_large_for_the_device(proxima, here):
    """Two layers of Qwen3-4B with a wide MLP, in the recipe of the whole: 1.1e9 weights, four times in float32."""
    shape = {"hidden_size": 2560, "intermediate_size": 40_000, "num_hidden_layers": 2, "num_attention_heads": 32}
    config = Qwen3Config(vocab_size=151936, head_dim=128, num_key_value_heads=8, tie_word_embeddings=True, **shape)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(here / "model")
    words = (
        ROOT / "recipes" / "qwen3_4b_grpo.yaml",
        "model.path=model",
        "sampling.max_tokens=1024",
        "train.tokens_per_micro_batch=2048",
        "--json",
    )
    code, out, _ = proxima("rehearse", *words, "--devices", "L4-24G")
    fit = json.loads(out)
    weights = (151936 * 2560 + 2 * (2560 * 128 * (32 + 2 * 8) + 32 * 128 * 2560 + 3 * 2560 * 40_000)) * 4
    assert fit["peak"]["weights"] == pytest.approx(weights, rel=1e-3)
    assert fit["peak"]["optimizer"] == pytest.approx(2 * weights, rel=1e-3)
    assert fit["faults"] == [] and not any(wait["inside"] for wait in fit["waits"])
    assert (code, fit["fits"]) == (1, False)
    words = [change["word"] for change in fit["advice"] if not change["word"].startswith("--devices")]
    assert {"engine.slots=32", "model.lora={rank: 16}"} <= {*words}
    assert all(change["needed"] < fit["needed"] for change in fit["advice"])
    for word in words:
        resolve(ROOT / "recipes" / "qwen3_4b_grpo.yaml", ["model.path=model", word])
