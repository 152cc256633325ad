"""The resolved config as YAML: complete, with provenance, and equal when it is read again."""

import yaml
from hypothesis import given
from hypothesis import strategies as st

from proxima.config import dump, resolve

TRICKY = [
    "1e-5",
    "true",
    "null",
    "a: b",
    "# no comment",
    "- x",
    "'",
    '"',
    "a\nb",
    " ",
    "{x}",
    "über",
    "yes",
    "*x",
    "%",
    "@",
    "\t",
    "0x1",
]


def again(text, path="again.yaml"):
    from pathlib import Path

    Path(path).write_text(text, encoding="utf-8")
    return resolve(path)


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


def test_any_yaml_reader_gets_the_same_numbers(recipe):
    read = yaml.safe_load(dump(resolve(recipe(), ["train.optimizer.lr=1e-7", "algorithm.reference_kl=k3"])))
    assert read["train"]["optimizer"]["lr"] == 1e-7
    assert read["sampling"]["temperature"] == 1.0
    assert read["algorithm"]["selection"] == []
    assert read["algorithm"]["reference_kl"].items() >= {"kind": "k3", "coefficient": 0.001}.items()


def test_texts_survive(recipe, tmp_path):
    for value in TRICKY:
        mapping = {
            "model": {"path": "a/b"},
            "task": {"kind": "tests.config.fakes:Everything", "name": value, "anything": {"k": [value, None, 1.5]}},
            "reward": "number",
            "algorithm": "cppo",
            "data": {"system": value},
        }
        recipe()
        resolved = resolve(mapping)
        assert again(dump(resolved)).config == resolved.config


@given(
    value=st.one_of(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])), st.sampled_from(TRICKY)),
    ratio=st.floats(allow_nan=False),
)
def test_any_text_and_number_survives(tmp_path_factory, value, ratio):
    mapping = {
        "model": {"path": "a/b"},
        "task": {"kind": "tests.config.fakes:Everything", "ratio": ratio},
        "reward": "number",
        "algorithm": "cppo",
        "data": {"system": value},
    }
    resolved = resolve(mapping)
    assert again(dump(resolved), tmp_path_factory.getbasetemp() / "again.yaml").config == resolved.config


def test_dump_of_a_dump_is_the_same_values(recipe):
    resolved = resolve(recipe(), ["algorithm=dapo"])
    second = again(dump(resolved))
    assert [(e.path, e.value) for e in second.entries] == [(e.path, e.value) for e in resolved.entries]
