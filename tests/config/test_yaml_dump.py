"""The resolved config as YAML: complete, with provenance, and equal when it is read again."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from proxima.config.resolution import resolve
from proxima.config.resolved import dump
from proxima.config.schema import RunConfig
from proxima.config.sections.data import DataConfig
from proxima.data.kinds import Slot

TRICKY = ["1e-5", "true", "null", "a: b", "# no comment", "- x", "'", '"', "a\nb", " ", "{x}", "über"]
TRICKY += ["yes", "*x", "%", "@", "\t", "0x1"]


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What the tests of many texts read of a recipe: a hundred values fewer."""

    task: Annotated[Any, Slot("proxima.task:TASKS"), "questions"]
    data: Annotated[DataConfig, "how rows become prompts"] = field(default_factory=DataConfig)


def again(text, path="again.yaml", root=RunConfig):
    Path(path).write_text(text, encoding="utf-8")
    return resolve(path, root=root)


def test_it_reads_back_equal_and_says_where_values_came_from(recipe):
    overrides = [
        "algorithm.surrogate.delta=.inf",
        "reward.1.kind=exact",
        "train.optimizer.lr=1e-7",
        "eval.task=tests.config.fakes:Sums",
    ]
    resolved = resolve(recipe(), overrides)
    text = dump(resolved)
    assert again(text).config == resolved.config
    lines = [line.split() for line in text.splitlines()]
    assert ["delta:", ".inf", "#", "command", "line,", "over", "0.15", "of", "the", "preset"] in lines
    assert ["kind:", "cppo", "#", "preset", "cppo,", "chosen", "in", "run.yaml:4"] in lines
    assert ["-", "kind:", "number", "#", "run.yaml:3"] in lines


def test_what_a_resume_reads_keeps_its_origin(recipe):
    run = Path("run/config.yaml")
    run.parent.mkdir()
    run.write_text(dump(resolve(recipe(), ["train.optimizer.lr=1e-7"])))
    before = run.read_text().splitlines()
    assert dump(resolve("run"), run).splitlines() == before
    changed = dump(resolve("run", ["train.steps=7"]), run).splitlines()
    (line,) = [line for line in changed if line not in before]
    assert len(changed) == len(before) and line.split()[:5] == ["steps:", "7", "#", "command", "line,"]


def test_any_yaml_reader_gets_the_same_numbers(recipe):
    read = yaml.safe_load(dump(resolve(recipe(), ["train.optimizer.lr=1e-7", "algorithm.reference_kl=k3"])))
    assert read["train"]["optimizer"]["lr"] == 1e-7
    assert read["sampling"]["temperature"] == 1.0
    assert read["algorithm"]["selection"] == []
    assert read["algorithm"]["reference_kl"].items() >= {"kind": "k3", "coefficient": 0.001}.items()


def test_texts_survive(recipe, tmp_path):
    for value in TRICKY:
        mapping = {
            "task": {"kind": "tests.config.fakes:Everything", "name": value, "anything": {"k": [value, None, 1.5]}},
            "data": {"system": value},
        }
        recipe()
        resolved = resolve(mapping, root=Texts)
        assert again(dump(resolved), root=Texts).config == resolved.config


@pytest.mark.slow
@given(
    value=st.one_of(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])), st.sampled_from(TRICKY)),
    ratio=st.floats(allow_nan=False),
)
def test_any_text_and_number_survives(tmp_path_factory, value, ratio):
    mapping = {"task": {"kind": "tests.config.fakes:Everything", "ratio": ratio}, "data": {"system": value}}
    resolved = resolve(mapping, root=Texts)
    path = tmp_path_factory.getbasetemp() / "again.yaml"
    assert again(dump(resolved), path, root=Texts).config == resolved.config
