"""What `explain` reckons of ranks that split matrices, tokens or experts, against a rehearsal."""

import json

import pytest

from proxima.lab.plan import read_devices
from proxima.lab.rehearsal.device_fit import rehearse_recipe
from tests.recipes.shapes import write_shape

LAYERS = 6  # of 48 and 64


@pytest.mark.parametrize(
    ("recipe", "layout", "model"),
    [
        ("qwen3_30b_cppo", "qwen3_30b_128xH800", "Qwen/Qwen3-30B-A3B-Base"),
        ("dapo_32b", "dapo_32b_8xH100", "Qwen/Qwen2.5-32B"),
    ],
)
def test_the_memory_of_a_layout(recipe, layout, model, tmp_path):
    file = write_shape(model, tmp_path) / "config.json"
    shape = json.loads(file.read_text())
    shape |= {"num_hidden_layers": LAYERS, "max_window_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS}
    file.write_text(json.dumps(shape))
    words = [f"@layouts/{layout}", f"model.path={file.parent}"]
    fit = rehearse_recipe(recipe, words, read_devices(f"{layout.rpartition('_')[2]}-80G"))
    assert fit.rehearsal.faults == () and fit.fits and fit.rehearsal.micro_batches >= 4
    assert fit.estimate == pytest.approx(fit.rehearsal.peak, rel=0.15)
    if recipe == "dapo_32b":  # the moments wait in host memory
        assert "optimizer" not in fit.rehearsal.peak_bytes
