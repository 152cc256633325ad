"""A command's config has only the sections that the command uses."""

from dataclasses import dataclass, field, fields
from typing import Annotated

import pytest

from proxima.config import ConfigError, EvaluateConfig, RunConfig, check, dump, load_recipe, resolve
from proxima.config.families import family_name
from proxima.config.sections.data_section import DataConfig
from proxima.config.sections.eval_section import CheckpointConfig
from proxima.config.sections.model_section import ModelConfig
from proxima.config.sections.train_section import TrainConfig
from tests.config.conftest import BASE


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """A command without engine, reward or task."""

    model: Annotated[ModelConfig, "the policy"]
    data: Annotated[DataConfig, "how rows become prompts"] = field(default_factory=DataConfig)
    train: Annotated[TrainConfig, "batch, optimizer, schedule"]
    checkpoint: Annotated[CheckpointConfig, "what is kept"] = field(default_factory=CheckpointConfig)


def test_a_config_of_four_sections():
    recipe = {"model": {"path": "org/model"}, "train": {"steps": 3}}
    resolved = resolve(recipe, ["train.optimizer.lr=1e-4"], root=Supervised)
    assert resolved.config.train.steps == 3 and resolved.config.train.optimizer.lr == 1e-4
    assert {entry.path.partition(".")[0] for entry in resolved.entries} == {each.name for each in fields(Supervised)}
    assert check(resolved) == []
    assert "steps: 3 " in dump(resolved)
    with pytest.raises(ConfigError, match=r"train.stepz=3 \(mapping\): 'train' has no field 'stepz'; did you mean"):
        resolve({**recipe, "train": {"stepz": 3}}, root=Supervised)


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
