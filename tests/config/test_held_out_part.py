"""Where a task holds out a part and `eval.task` is left out, the part is evaluated."""

from dataclasses import dataclass, replace

import pytest

from proxima.cli.explanation import text_of
from proxima.config.problems import ConfigError
from proxima.config.recipe_reader import read_yaml
from proxima.config.resolution import resolve
from proxima.config.resolved import dump
from proxima.config.schema import EvaluateConfig
from proxima.config.validate import warnings
from proxima.task.held_out_part import SplitTask
from proxima.task.local_files import Csv
from proxima.task.mix import Mix
from proxima.task.protocol import MappedRows, Row, user_message

TASK = {"kind": "csv", "path": "t.csv", "held_out": 0.1}
BASE = {"model": {"path": "org/model"}, "reward": ["number"], "algorithm": "cppo"}
PLAIN = {"kind": "csv", "path": "t.csv"}


def resolved(task, *overrides, root=None, **sections):
    return resolve(BASE | {"task": task} | sections, overrides, root=root)


@dataclass(frozen=True, kw_only=True)
class Riddles(SplitTask):
    """A kind of somebody else's."""

    size: int = 20

    def all_rows(self, seed):
        return MappedRows(range(self.size), lambda i, _: Row(messages=user_message(f"Riddle {i}?"), answer=str(i)))


HERE = f"{Riddles.__module__}:Riddles"


@pytest.mark.parametrize(
    ("task", "held_out"),
    [
        (TASK, Csv(path="t.csv", held_out=0.1, part="held_out")),
        (PLAIN, None),
        (TASK | {"held_out": None}, None),
        ({"kind": "arithmetic", "held_out": 0.1}, None),  # whose test side is another task's
        ({"kind": HERE, "held_out": 0.3}, Riddles(held_out=0.3, part="held_out")),
        ({"kind": HERE}, None),
    ],
)
def test_the_held_out_part_is_evaluated(task, held_out):
    r = resolved(task)
    assert r.config.eval.task == held_out
    assert resolved(task, eval={"every": 2}).config.eval.task == held_out
    assert resolved(task, root=EvaluateConfig).config.eval.task == held_out  # `proxima eval MODEL RECIPE`
    if held_out is not None:
        assert r.config.task == replace(held_out, part="train") and r.config.eval.sampling.temperature == 0
        assert not warnings(r)


def test_a_task_that_is_written_is_kept():
    for eval in ({"task": None}, {"task": {"kind": "gsm8k", "split": "test"}}):
        written = resolved(TASK, eval=eval).config.eval.task
        assert getattr(written, "split", None) == (eval["task"] or {}).get("split")
    assert resolved(TASK, "eval.task=null").config.eval.task is None
    assert resolved(TASK, "eval.task=null", eval={"every": 5}).config.eval.task is None


def test_a_run_evaluates_the_same_part_again(tmp_path):
    r = resolved(TASK, "task.path=other.csv", eval={"every": 2}, checkpoint={"keep_best": True})
    assert r.config.eval.task.path == "other.csv"
    assert r.entry("eval.task.path").source == "as task.path" and r.entry("eval.task.path").is_default
    (tmp_path / "config.yaml").write_text(dump(r))
    for root in (None, EvaluateConfig):
        again = resolve(tmp_path / "config.yaml", root=root)
        assert again.config.eval == r.config.eval
    assert read_yaml(tmp_path / "config.yaml").to_python()["eval"]["task"]["part"] == "held_out"


@pytest.mark.parametrize("family", [{"sft": {}}, {"reward_model": {}}, {"preference": {"loss": "sigmoid"}}])
def test_so_do_the_runs_on_fixed_data(family):
    recipe = {"model": BASE["model"], "task": TASK} | family
    config = resolve(recipe, root=None).config
    assert config.eval.task == replace(config.task, part="held_out")
    assert resolve(recipe, root=EvaluateConfig).config.eval.task is None  # these rows have no reward


def test_a_mix_evaluates_the_parts_of_its_sources():
    sources = [{"name": "a", "task": TASK}, {"name": "b", "weight": 3, "task": {"kind": "arithmetic"}}]
    r = resolved({"kind": "mix", "tasks": sources, "size": 50})
    mix = r.config.eval.task
    assert isinstance(mix, Mix) and mix.part == "held_out"
    assert [source.task for source in mix.sources.values()] == [Csv(path="t.csv", held_out=0.1, part="held_out")]
    assert not warnings(r)
    outer = {"kind": "mix", "tasks": [{"name": "inner", "task": {"kind": "mix", "tasks": sources}}], "column": "of"}
    assert resolved(outer).config.eval.task.part == "held_out"
    assert resolved({"kind": "mix", "tasks": sources[1:]}).config.eval.task is None


@pytest.mark.parametrize(
    ("task", "asked", "warned"),
    [
        (TASK, TASK | {"part": "held_out"}, ""),
        (TASK, TASK | {"part": "held_out", "held_out": 0.05}, ""),  # a question held out for .05 is so for .1
        (TASK, TASK | {"part": "held_out", "held_out": 0.2}, "set eval.task.part=held_out and eval.task.held_out=0.1"),
        (TASK, TASK, "set eval.task.part=held_out and eval.task.held_out=0.1"),
        (TASK, PLAIN, "leave eval.task out"),
        (PLAIN, PLAIN, "name another file with eval.task.path, or leave eval.task out and set task.held_out=0.1"),
        (PLAIN, TASK | {"part": "held_out"}, "set task.held_out"),
        (TASK, TASK | {"path": "u.csv"}, ""),
    ],
)
def test_questions_in_common_are_warned_of(task, asked, warned):
    found = warnings(resolved(task, eval={"task": asked}))
    assert len(found) == bool(warned) and all(warned in problem.message for problem in found)


def test_a_mistake_in_the_task_is_said_once():
    with pytest.raises(ConfigError) as refused:
        resolved(TASK | {"held_out": 1.5})
    assert [problem.path for problem in refused.value.problems] == ["task.held_out"]
    with pytest.raises(ConfigError) as refused:
        resolved(TASK | {"quesion": "x"})
    assert [problem.path for problem in refused.value.problems] == ["task.quesion"]


def test_explain_shows_both_sides(tmp_path):
    (tmp_path / "t.csv").write_text("question,answer\n" + "".join(f"Is {i} even?,{i % 2}\n" for i in range(100)))
    held_out = len(Csv(path=str(tmp_path / "t.csv"), held_out=0.1, part="held_out").rows(1))
    text = " ".join(text_of(resolved(TASK | {"path": str(tmp_path / "t.csv")})).split())
    assert "held out: csv, its held-out part" in text
    assert f"task: {100 - held_out} of 100 rows; {held_out} are held out by a hash of the question" in text
    assert "held out: nothing (set task.held_out=0.1, or eval.task)" in " ".join(text_of(resolved(PLAIN)).split())
