"""A command's config has only the sections that the command uses."""

from dataclasses import dataclass, fields

import pytest

from proxima.config.families import family_name
from proxima.config.problems import ConfigError
from proxima.config.resolution import resolve
from proxima.config.schema import EvaluateConfig, RunConfig
from proxima.config.validate import load_recipe
from tests.config.conftest import BASE


def test_an_evaluation_needs_a_model_alone():
    config = load_recipe({}, ["model.path=org/model"], root=EvaluateConfig).config
    assert config.reward == () and config.eval.task is None
    assert {each.name for each in fields(EvaluateConfig)} < {each.name for each in fields(RunConfig)}


def test_an_evaluation_reads_no_training_section(recipe):
    """The evaluation's defaults still follow the training's sampling."""
    text = f"{BASE}sampling: {{max_tokens: 5}}\ntrain: {{steps: many}}\n"
    text += "eval: {task: {kind: tests.config.fakes:Sums}}\n"
    config = load_recipe(recipe(text), root=EvaluateConfig).config
    assert config.eval.sampling.max_tokens == 5 and config.eval.sampling.temperature == 0
    with pytest.raises(ConfigError, match="train.steps=many"):
        load_recipe(recipe(text))


def test_a_key_of_no_command_is_unknown_everywhere(recipe):
    with pytest.raises(ConfigError, match="trian"):
        load_recipe(recipe(f"{BASE}trian: {{steps: 1}}\n"), root=EvaluateConfig)


@pytest.mark.parametrize(
    ("command", "section", "rate"),
    [("sft", {}, 2e-5), ("reward_model", {}, 1e-5), ("preference", {"loss": "sigmoid"}, 1e-6)],
)
def test_each_training_on_a_fixed_data_set_has_its_learning_rate(command, section, rate):
    recipe = {"model": {"path": "org/model"}, "task": "gsm8k", command: section}
    resolved = resolve(recipe, root=None)
    assert resolved.config.train.optimizer.lr == rate
    assert resolved.entry("train.optimizer.lr").source == f"default of {family_name(resolved.config)} recipes"
    for train in ({"optimizer": "adamw"}, {"optimizer": {"eps": 1e-6}}, {"epochs": 2}):
        assert resolve({**recipe, "train": train}, root=None).config.train.optimizer.lr == rate
    assert resolve(recipe, ["train.optimizer.lr=3e-4"], root=None).config.train.optimizer.lr == 3e-4
    kind = {"kind": "tests.config.test_sections:Plain"}
    assert resolve({**recipe, "train": {"optimizer": kind}}, root=None).config.train.optimizer == Plain()


@dataclass(frozen=True)
class Plain:
    """An optimizer of another package, without a field `lr`."""
