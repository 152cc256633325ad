"""The table of what `proxima train` trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from proxima.config import EvaluateConfig, RunConfig, resolve
from proxima.config.describe import class_at, fields_of
from proxima.config.families import FAMILIES, OFFLINE, TRAIN, family_name, family_of_config
from proxima.config.sections.offline_section import OfflineConfig
from proxima.train.offline.method import OfflineMethod

SOURCES = str(Path(__file__).resolve().parents[2] / "src")


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


A_LINE_MORE = """
import importlib.util, json, sys
from importlib.machinery import SourceFileLoader

class OneMore(SourceFileLoader):
    def get_data(self, path):
        line = b'''Family(name="copy", own="copying",
            config="copying_section:CopyingConfig", method="copying_method:CopyingMethod", learning_rate=3e-6),'''
        return super().get_data(path).replace(b"OFFLINE = (", b"OFFLINE = (" + line, 1)

    def get_code(self, name):
        return compile(self.get_source(name), self.path, "exec", dont_inherit=True)

name = "proxima.config.families"
spec = importlib.util.find_spec(name)
spec.loader = OneMore(name, spec.origin)
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])

import proxima.cli.main
light = "torch" not in sys.modules
from proxima.config import resolve
config = resolve({"model": {"path": "org/model"}, "task": "gsm8k", "copying": {}}, root=None).config
print(json.dumps({
    "light": light, "config": type(config).__name__, "times": config.copying.times, "lr": config.train.optimizer.lr,
}))
"""
COPYING_SECTION = """
from dataclasses import dataclass, field

from proxima.config.sections.offline_section import OfflineConfig


@dataclass(frozen=True, kw_only=True)
class CopyingSection:
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class CopyingConfig(OfflineConfig):
    copying: CopyingSection = field(default_factory=CopyingSection)
"""


def test_a_line_of_the_table_makes_a_family(tmp_path):
    """A family that does not exist, of a section in a module of its own and one line more in the file of the table."""
    (tmp_path / "copying_section.py").write_text(COPYING_SECTION)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([SOURCES, str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, "-c", A_LINE_MORE], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    shown = json.loads(done.stdout)
    assert shown == {"light": True, "config": "CopyingConfig", "times": 1, "lr": 3e-6}
