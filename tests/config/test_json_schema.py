"""The JSON schema: valid itself, accepts every recipe, refuses what the resolver refuses for its shape, and the file is
up to date."""

import json
from pathlib import Path

import jsonschema
import pytest

from proxima.config.json_schema import json_schema
from proxima.config.presets import ALGORITHMS
from proxima.config.problems import ConfigError
from proxima.config.recipe_reader import read_yaml
from proxima.config.resolution import resolve

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
SMALL = {"model": {"path": "a/b"}, "task": "arithmetic", "reward": "number", "algorithm": "cppo"}


def problems(validator, recipe):
    return [error.message for error in validator.iter_errors(recipe)]


def misshapen(recipe):
    """What the resolver refuses in a recipe, except for missing values and code that is not imported."""
    try:
        resolve(recipe, root=None, import_code=False)
    except ConfigError as error:
        return [p for p in error.problems if not p.message.startswith(("is missing", "is code outside proxima"))]
    return []


@pytest.fixture(scope="module")
def schema():
    return json_schema()


@pytest.fixture(scope="module")
def validator(schema):
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    sorted({*FOLDER.glob("**/*.yaml")} - {*FOLDER.glob("sweeps/*"), *FOLDER.glob("layouts/*")}),
    ids=lambda path: path.stem,
)
def test_every_recipe_is_valid(validator, recipe):
    assert problems(validator, read_yaml(recipe).to_python()) == []


def test_the_file_beside_the_recipes_is_up_to_date(schema):
    text = (FOLDER / "schema.json").read_text(encoding="utf-8")
    assert json.loads(text) == schema, "run `make docs`"


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": {"preset": "cppo", "surrogate": {"delta": 0.2}}},
        {"algorithm": {"surrogate": {"kind": "drpo", "epsilon": 1}}},
        {"algorithm": {"surrogate": "drpo", "selection": ["drop_uniform_groups"], "reference_kl": None}},
        {"algorithm": {"surrogate": "drpo", "aggregate": "seq-mean-token-mean"}},
        {"reward": [{"kind": "number", "weight": 2}, "format", {"kind": "my.rewards:Style", "anything": 1}]},
        {"task": {"kind": "my.tasks:Riddles", "level": 3}},
        {"train": {"steps": 3, "optimizer": {"lr": 1e-5}}},
        {"eval": {"task": None, "sampling": None}},
        *({"algorithm": name} for name in sorted(ALGORITHMS)),
    ],
)
def test_accepts_what_the_resolver_accepts(validator, change):
    recipe = {**SMALL, **change}
    assert problems(validator, recipe) == misshapen(recipe) == []


@pytest.mark.parametrize(
    "recipe",
    [
        {**SMALL, "trian": {}},
        {**SMALL, "algorithm": "cpo"},
        {**SMALL, "algorithm": {"surrogate": {"kind": "cppo", "dleta": 1}}},
        {**SMALL, "algorithm": {"surrogate": {"kind": "cpoo"}}},
        {**SMALL, "algorithm": {"preference": {"kind": "cppo"}}},
        {**SMALL, "train": {"steps": "many"}},
        {**SMALL, "train": {"schedule": "sine"}},
        {**SMALL, "train": {"optimizer": {"kind": "adam"}}},
        {**SMALL, "model": {"share_prompt": "yes"}},
        {key: value for key, value in SMALL.items() if key != "task"},
    ],
)
def test_refuses_what_the_resolver_refuses(validator, recipe):
    assert problems(validator, recipe) and (misshapen(recipe) or "task" not in recipe)


def test_a_recipe_needs_a_reward_unless_its_task_is_a_mix(validator):
    without = {key: value for key, value in SMALL.items() if key != "reward"}
    assert problems(validator, without) and problems(validator, without | {"task": {"kind": "arithmetic"}})
    sources = [{"name": "a", "task": "arithmetic", "reward": "number", "learns_from": "teacher"}]
    assert problems(validator, without | {"task": {"kind": "mix", "tasks": sources}}) == []
