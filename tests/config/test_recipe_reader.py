"""YAML and `key=value` texts: what people write is what they get, or one line that says where it went wrong."""

import math
import re
from dataclasses import make_dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from proxima.config.describe import root_field
from proxima.config.problems import ConfigError
from proxima.config.recipe_reader import read_overrides, read_recipe, read_yaml
from proxima.config.resolution import resolve
from proxima.config.tree import merge
from proxima.data.kinds import Slot
from proxima.system.user_files import shown_path
from tests.refusals import refused

NO_FIELD = "a `:` where no field can begin: indent the fields of a section alike, and quote a text that contains `: `"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.0e-5", 1e-5),
        ("5e8", 5e8),
        (".5", 0.5),
        ("-3", -3),
        ("10_000", 10_000),
        ("0x10", 16),
        ("007", 7.0),
        (".inf", math.inf),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("none", "none"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("''", ""),
        ("'1e-5'", "1e-5"),
        ("1.2.3", "1.2.3"),
        ("[1, 1e-5, no]", [1, 1e-5, "no"]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
    ],
)
def test_a_scalar_is_what_people_mean(recipe, text, value):
    values = read_yaml(Path(recipe(f"x: {text}"))).to_python()["x"]
    assert values == value
    assert type(values) is type(value)


def test_a_node_knows_its_line_and_its_text(recipe):
    root = read_yaml(Path(recipe("a:\n  b: 1e-5\n  c:\n    - 1\n    - 2\n")))
    b, c = root.mapping["a"].mapping["b"], root.mapping["a"].mapping["c"]
    assert (b.source.text, b.text, b.value) == ("run.yaml:2", "1e-5", 1e-5)
    assert [item.source.text for item in c.items] == ["run.yaml:4", "run.yaml:5"]


def test_merge_keys_and_anchors(recipe):
    root = read_yaml(Path(recipe("base: &b {x: 1, y: 2}\nother:\n  <<: *b\n  y: 3\n")))
    assert root.to_python()["other"] == {"x": 1, "y": 3}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "a: 1\nb: [1, 2\n",
            "run.yaml:3: not YAML: a `[` that is not closed, or a missing comma, in this line or above",
        ),
        ("a:\n  b: 1\n   c: 2\n", f"run.yaml:3: not YAML: {NO_FIELD}"),
        ("a: b: c\n", f"run.yaml:1: not YAML: {NO_FIELD}"),
        ("a:\n\tb: 1\n", "run.yaml:2: not YAML: a tab; indent with spaces"),
        (
            "a:\n  b: 1\n c: 2\n",
            "run.yaml:3: not YAML: its indentation fits none of the lines above: indent the fields of a section alike",
        ),
        ("a:\n  b: 1\n- c\n", "run.yaml:3: not YAML: a list item (`-`) among fields: indent it below its own field"),
        ('a: "b\nc: 1\n', "run.yaml:3: not YAML: a quotation mark that is not closed"),
        ("a: 1\na: 2\n", "run.yaml:2: the key 'a' is given twice; keep one"),
        ("a: {b: 1, b: 2}\n", "run.yaml:1: the key 'b' is given twice; keep one"),
        (
            "- 1\n",
            "run.yaml: must be a mapping of fields (`model: …`, `task: …`); `proxima init` writes one to start from",
        ),
        ("", "run.yaml: is empty; `proxima init` writes a recipe to start from"),
        ("# nothing\n", "run.yaml: is empty; `proxima init` writes a recipe to start from"),
        ("a: &x [*x]\n", "run.yaml:1: an anchor contains itself; write the value out"),
        ("? [1, 2]\n: 3\n", "run.yaml:1: a key must be a plain word"),
    ],
)
def test_a_broken_file_is_named_with_its_line(recipe, text, line):
    assert refused(read_yaml, Path(recipe(text))) == [line]


def test_no_python_object_is_made(recipe):
    (line,) = refused(read_yaml, Path(recipe("a: !!python/object/apply:os.system ['true']\n")))
    tag = "tag:yaml.org,2002:python/object/apply:os.system"
    assert line.startswith(f"run.yaml:1: the tag '{tag}' has no meaning here")


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ('a: !!int "x"', "int"),
        ("a: !!int 5", "int"),
        ('a: !!float "x"', "float"),
        ("a: !!bool maybe", "bool"),
        ("a: !!null x", "null"),
        ("a: !!timestamp x", "timestamp"),
        ('a: !!binary "é"', "binary"),
        ("a: !!str 5", "str"),
        ("!!str a: 5", "str"),
        ("a: [1, !!set {b}]", "set"),
        ("a: !!map {b: 1}", "map"),
        ("a: !!python/name:os.system ''", "python/name:os.system"),
    ],
)
def test_tags_are_refused(recipe, text, tag):
    said = f"run.yaml:1: the tag 'tag:yaml.org,2002:{tag}' has no meaning here; leave it out"
    assert refused(read_yaml, Path(recipe(f"{text}\n"))) == [said]


def test_an_integer_beyond_every_float_is_no_number_of_a_field(recipe):
    longest = "0x" + "f" * 300
    with pytest.raises(ConfigError, match="lr=.*: must be a number"):
        resolve(recipe(f"train:\n  optimizer:\n    lr: {longest}\n"))
    with pytest.raises(ConfigError, match="weight"):
        resolve({"reward": [{"kind": "exact", "weight": [10**5000]}]})


@pytest.mark.parametrize("number", ["1" * 309, "-" + "9" * 5000, "0x" + "f" * 5000, "1_0" * 2000])
def test_an_integer_has_a_bounded_number_of_digits(recipe, number):
    (line,) = refused(read_yaml, Path(recipe(f"train:\n  steps: {number}\n")))
    assert re.fullmatch(r"run.yaml:2: a number of [0-9,]+ digits, at most 308 can be read", line)
    assert read_yaml(Path(recipe(f"a: {'1' * 308}\n"))).to_python() == {"a": int("1" * 308)}


def test_a_missing_recipe_names_the_nearest_file(recipe):
    recipe(name="recipes/quickstart.yaml")
    (line,) = refused(read_recipe, "recipes/quikstart.yaml")
    assert line == "recipes/quikstart.yaml: no such recipe; did you mean recipes/quickstart.yaml?"
    recipe(name="recipes/mine.yaml")
    assert refused(read_recipe, "mine") == ["mine: no such recipe; did you mean recipes/mine.yaml?"]


def test_a_binary_file_is_no_recipe(recipe):
    Path(recipe()).write_bytes(b"\xff\xfe\x00")
    assert refused(read_recipe, "run.yaml") == ["run.yaml: is not UTF-8 text; a recipe is a YAML file"]


def test_extends_is_relative_to_its_own_file(recipe):
    recipe("a: {x: 1, y: 1, l: [1, 2]}\n", "deep/base.yaml")
    recipe("extends: base.yaml\na: {y: 2}\n", "deep/middle.yaml")
    recipe("extends: deep/middle.yaml\na: {z: 3, l: [9]}\n")
    low, middle, high = read_recipe("run.yaml")
    root = merge(merge(low, middle), high)
    assert root.to_python() == {"a": {"x": 1, "y": 2, "z": 3, "l": [9]}}
    fields = root.mapping["a"].mapping
    assert fields["x"].provenance() == "deep/base.yaml:1"
    assert fields["y"].provenance() == "deep/middle.yaml:2, over 1 of deep/base.yaml:1"
    assert fields["z"].provenance() == "run.yaml:2"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("base.yaml", "extends=base.yaml (deep/run.yaml:1): no such file; the path is relative to deep/"),
        (
            "quickstart.yaml",
            "extends=quickstart.yaml (deep/run.yaml:1): no such file; the path is relative to deep/; the recipe that "
            "comes with proxima is extends: quickstart",
        ),
        ("[a, b]", "extends=[a, b] (deep/run.yaml:1): must be the path of one recipe"),
    ],
)
def test_extends_that_is_not_there(recipe, text, line):
    assert refused(read_recipe, recipe(f"extends: {text}\n", "deep/run.yaml")) == [line]


SLOT = root_field(make_dataclass("Config", [("s", Annotated[Any, Slot("")])]))


def test_overrides_are_yaml_and_their_order_does_not_matter():
    texts = ["a.b=1e-3", "a.c=[1, two]", "s.x=1", "s=name", "t=Answer: [", "n=null", "e=", "q=a=b"]
    for order in (texts, texts[::-1]):
        value = read_overrides(order, SLOT).to_python()
        assert value == {
            "a": {"b": 1e-3, "c": [1, "two"]},
            "s": {"kind": "name", "x": 1},
            "t": "Answer: [",
            "n": None,
            "e": None,
            "q": "a=b",
        }


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        (
            ["reward=[{kind:", "number},", "{kind:", "length}]"],
            "reward=[{kind:: the shell has split the value at a space: quote it, reward='[{kind: …'",
        ),
        (["x=[1,", "2]"], "x=[1,: the shell has split the value at a space: quote it, x='[1, …'"),
        (["lost", "x=[1"], "lost (command line): is not an override; write key=value, for example train.steps=10"),
        (["steps"], "steps (command line): is not an override; write key=value, for example train.steps=10"),
        (
            ["train..steps=1"],
            "train..steps=1 (command line): has an empty part before the `=`; write key=value, for example "
            "train.steps=10",
        ),
        (["=1"], "=1 (command line): has an empty part before the `=`; write key=value, for example train.steps=10"),
        (["a=1", "b=2", "a=3"], "a (command line): given more than once (1, 3); keep one"),
    ],
)
def test_overrides_that_say_nothing(texts, line):
    assert refused(read_overrides, texts, SLOT) == [line]


def test_a_shown_path_has_no_detours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown_path(tmp_path / "cpu" / ".." / "a.yaml") == "a.yaml"
    assert shown_path(Path("/elsewhere/cpu/../a.yaml")) == "/elsewhere/a.yaml"
