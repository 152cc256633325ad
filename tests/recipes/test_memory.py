"""What a recipe says it needs is what `proxima plan` adds up. The models' shapes are written here: none of them has
to be had."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from proxima.config.resolution import resolve
from proxima_plan.devices import GIB, Devices, device_kinds
from proxima_plan.forecast import plan_recipe
from proxima_plan.model_size import known_facts, known_models, model_facts
from tests.recipes.shapes import SHAPES, write_shape

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
# of DeepSeek, which `model_facts` lacks
LATENT = {"kv_width": 288, "query_width": 128 * 160, "intermediate": 9 * 2048, "kv_heads": 1}
DEVICE = Devices(device_kinds()["B200-180G"], 1)  # of any size: the figure is what it needs
LARGE = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem not in ("quickstart", "search"))


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """Model → its size, each read once."""
    root, result = tmp_path_factory.mktemp("shapes"), {}

    def of(path):
        if path not in result:
            result[path] = model_facts(str(write_shape(path, root)))
            assert result[path].parameters == SHAPES[path][1]
        return result[path]

    return of


@pytest.mark.parametrize("name", LARGE)
def test_the_memory_that_it_names(name):
    """That of the whole plan on one device, trainer and engine, with prompts of 128 tokens; and with other slots."""
    lines = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    said = [("", line.rsplit("|", 2)[1].split()[0]) for line in lines if f"({name}.yaml)" in line][:1]
    assert said
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    said += re.findall(r"(?:with (engine\.slots=\d+) )?about ([\d,]+) GiB", text)
    for words, gib in said:
        plan = plan_recipe(resolve(FOLDER / f"{name}.yaml", [words] if words else [], root=None), DEVICE)
        assert int(gib.replace(",", "")) == round(plan.memory.needed / GIB)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(SHAPES))
def test_a_known_size_is_that_of_the_model(path, facts):
    counted = facts(path)
    assert known_facts(path) == (replace(counted, **LATENT) if "DeepSeek" in path else counted)
    if counted.all_experts:
        assert counted.active < counted.parameters / 5


def test_models_of_one_shape_have_one_size():
    """Instruct, base and plain ones of a name."""
    family = {"qwen2.5-7b": "qwen2.5-7b-instruct", "qwen3-4b": "qwen3-4b-base", "qwen3-30b-a3b": "qwen3-30b-a3b-base"}
    family |= {"qwen2.5-math-7b": "qwen2.5-7b-instruct", "qwen2.5-3b-instruct": "qwen2.5-3b"}
    family |= {"llama-3.1-8b-instruct": "llama-3.1-8b", "smollm2-135m-instruct": "smollm2-135m"}
    assert {name: known_models()[name] for name in family} == {
        name: known_models()[other] for name, other in family.items()
    }
    assert set(known_models()) - {path.rpartition("/")[2].lower() for path in SHAPES} == set(family)
    assert (
        known_facts("models/SmolLM2-135M-Instruct/") == known_models()["smollm2-135m"]
        and known_facts("org/other") is None
    )
