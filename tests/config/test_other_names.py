"""The peers' names of our fields."""

import pytest

from proxima.config.describe import fields_of, kinds_of
from proxima.config.families import FAMILIES
from proxima.config.other_names import _NAMES
from proxima.config.problems import ConfigError
from proxima.config.resolution import resolve


def fields_below(cls, path=""):
    for info in fields_of(cls):
        yield f"{path}{info.name}"
        below = kinds_of(info.slot).values() if info.slot else filter(None, [info.section])
        for inner in below if path.count("tasks.") < 2 else ():  # a mix of tasks may hold another
            yield from fields_below(inner, f"{path}{info.name}.")


@pytest.fixture(scope="module")
def families():
    return [set(fields_below(family.root)) for family in FAMILIES.values()]


NAMES = [(name, field) for field, names in _NAMES.items() for name in names.split()]


@pytest.mark.parametrize(("name", "field"), NAMES)
def test_what_a_peer_calls_a_field_exists_here_and_is_no_field_itself(families, name, field):
    field = field.replace("loss.0.", "loss.")
    assert any(field in fields for fields in families)
    assert field.rpartition(".")[2] != name or field.startswith("preference.loss.")  # a level above: preference.beta


def test_a_field_that_is_gone_says_how_a_run_of_another_version_continues(tmp_path):
    (tmp_path / "config.yaml").write_text("runtime: {rollout_retries: 2}\n")
    remedy = "has no field 'rollout_retries'; .*; if another version began this run, delete the line and resume with"
    with pytest.raises(ConfigError, match=rf"config.yaml:1\): 'runtime' {remedy} --accept-changes"):
        resolve(tmp_path)
