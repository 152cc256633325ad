"""The table of the commands that train."""

import pytest

from proxima.config import EvaluateConfig, RunConfig, resolve
from proxima.config.describe import class_at, fields_of
from proxima.config.families import FAMILIES, OFFLINE, TRAIN, command_of, family_of_config
from proxima.config.sections.offline_section import OfflineConfig
from proxima.train.offline.method import OfflineMethod


def test_every_line_names_a_config_with_its_own_section_and_a_method():
    for family in OFFLINE:
        names = {info.name for info in fields_of(family.root)}
        others = {info.name for other in FAMILIES.values() if other is not family for info in fields_of(other.root)}
        assert issubclass(family.root, OfflineConfig) and family.own in names - others
        assert issubclass(class_at(family.method), OfflineMethod) and family.learning_rate > 0
    assert (TRAIN.root, TRAIN.own, TRAIN.method, TRAIN.learning_rate) == (RunConfig, "", "", None)


@pytest.mark.parametrize("command", FAMILIES)
def test_a_config_knows_its_command(command):
    family = FAMILIES[command]
    assert command_of(family.root) == command and family_of_config(family.root) is family
    recipe = {"model": {"path": "org/model"}, "task": "gsm8k"}
    recipe |= {family.own: {"loss": "sigmoid"} if command == "dpo" else {}} if family.own else {}
    recipe |= {} if family.own else {"reward": "number", "algorithm": "grpo"}
    assert type(resolve(recipe, root=None).config) is family.root
    assert family_of_config(EvaluateConfig) is None
