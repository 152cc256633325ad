"""The table of what `proxima train` trains."""

from dataclasses import dataclass, field

import pytest

from proxima.config import families
from proxima.config.describe import class_at, fields_of
from proxima.config.families import FAMILIES, OFFLINE, TRAIN, family_name, family_of_config
from proxima.config.resolution import resolve
from proxima.config.schema import EvaluateConfig, RunConfig
from proxima.config.sections.offline import OfflineConfig
from proxima.training.offline.method import OfflineMethod


def test_every_line_names_a_config_with_its_own_section_and_a_method():
    for family in OFFLINE:
        names = {info.name for info in fields_of(family.root)}
        others = {info.name for other in FAMILIES.values() if other is not family for info in fields_of(other.root)}
        assert issubclass(family.root, OfflineConfig) and family.own in names - others
        assert issubclass(class_at(family.method), OfflineMethod) and family.learning_rate > 0
    assert (TRAIN.root, TRAIN.own, TRAIN.method, TRAIN.learning_rate) == (RunConfig, "", "", None)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_knows_its_family(name):
    family = FAMILIES[name]
    assert family_name(family.root) == name and family_of_config(family.root) is family
    recipe = {"model": {"path": "org/model"}, "task": "gsm8k"}
    recipe |= {family.own: {"loss": "sigmoid"} if name == "dpo" else {}} if family.own else {}
    recipe |= {} if family.own else {"reward": "number", "algorithm": "grpo"}
    assert type(resolve(recipe, root=None).config) is family.root
    assert family_of_config(EvaluateConfig) is None


@dataclass(frozen=True, kw_only=True)
class CopyingSection:
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class CopyingConfig(OfflineConfig):
    copying: CopyingSection = field(default_factory=CopyingSection)


@pytest.mark.slow
def test_a_line_of_the_table_makes_a_family(monkeypatch):
    """A family that does not exist, of a section in a module of its own."""
    config = f"{__name__}:CopyingConfig"
    copy = families.Family(name="copy", own="copying", config=config, method="copying_method:M", learning_rate=3e-6)
    monkeypatch.setattr(families, "OFFLINE", (*OFFLINE, copy))
    monkeypatch.setattr(families, "FAMILIES", FAMILIES | {"copy": copy})
    config = resolve({"model": {"path": "org/model"}, "task": "gsm8k", "copying": {}}, root=None).config
    assert (type(config), config.copying.times, config.train.optimizer.lr) == (CopyingConfig, 1, 3e-6)
