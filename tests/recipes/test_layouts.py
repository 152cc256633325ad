"""Recipes in the layouts of their clusters, two steps of the command line: tiny models, groups of two of four ranks."""

import math

import pytest
import yaml

from proxima.config.resolution import resolve
from proxima.runtime.state.folder import RunFolder
from proxima_plan.devices import read_devices
from proxima_plan.forecast import plan_recipe
from scripts.figures import results
from tests.recipes.shapes import write_shape
from tests.recipes.smaller import RANKS, on_four_ranks
from tests.runtime.placement.launched import launched

pytestmark = pytest.mark.slow

GROUPS = {  # a recipe in a layout → its groups of ranks
    ("qwen3_30b_cppo", "qwen3_30b_128xH800"): {"context_parallel", "expert_parallel"},
    ("dapo_32b", "dapo_32b_8xH100"): {"tensor_parallel"},
}  # `python -m benchmarks.layouts --run` has the others


def test_the_formula_has_what_rehearsals_counted(tmp_path):
    """Of a rank of each layout, in which groups split matrices, tokens or experts."""
    rows = results("layouts")[-1]["rows"]
    for recipe in ("qwen3_30b_cppo", "qwen3_4b_cppo", "dapo_32b"):
        model = write_shape(resolve(recipe).config.model.path, tmp_path)
        for layout, row in rows[recipe].items():
            resolved = resolve(recipe, [f"@layouts/{layout}", f"model.path={model}"])
            plan = plan_recipe(resolved, read_devices(row["devices"])[0])
            memory = plan.memory
            assert (memory.needed / 2**30, plan.seconds) == pytest.approx(
                (row["planned_gib"], row["step_seconds"]), rel=0.01
            ), "update the plans of benchmarks/layouts/results"
            assert 1 <= sum(memory.trainer.values()) / 2**30 / row["rehearsal"]["peak_gib"] < 1.15, layout
            assert row["rehearsal"]["fits"] and row["fits"]


@pytest.mark.campaign("tests/training/test_ranks.py::test_an_update_is_that_of_one_process[parts]")
@pytest.mark.parametrize(("recipe", "layout"), GROUPS)
def test_two_steps_on_four_ranks(recipe, layout, tmp_path):
    out = tmp_path / "run"
    words = [*on_four_ranks(recipe, f"layouts/{layout}", tmp_path), f"folder={out}"]
    code, said = launched(words, ranks=RANKS, output=tmp_path / "log.txt")
    assert code == 0, said
    records = [record for record in RunFolder(out).read_metrics() if record["kind"] == "train"]
    assert [record["step"] for record in records] == [1, 2]
    assert all(math.isfinite(value) for record in records for value in record.values() if isinstance(value, float))
    assert any(record["grad_norm"] > 0 for record in records)
    config = yaml.safe_load((out / "config.yaml").read_text())
    groups = {name for name, size in config["placement"].items() if name.endswith("_parallel") and size == 2}
    assert groups == GROUPS[recipe, layout]
