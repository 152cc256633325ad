"""Where a task holds out a part and `eval.task` is left out, the part is evaluated."""

import json
from dataclasses import dataclass, replace

import pytest

from proxima.cli.explanation import arithmetic_of, text_of
from proxima.cli.main import main
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


def rows_file(path, count):
    path.write_text("question,answer\n" + "".join(f"{i}+{i}?,{2 * i}\n" for i in range(1, count + 1)))
    return {"kind": "csv", "path": str(path)}


def test_explain_refuses_what_train_refuses(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    few = rows_file(tmp_path / "few.csv", 3)
    recipe = tmp_path / "r.yaml"
    for task, line in (
        (few | {"held_out": 0.1}, "eval.task.held_out=0.1 (as task.held_out): leaves none of the 3 rows in the held-"),
        (few | {"held_out": 0.9999}, "task.held_out=0.9999 (r.yaml:3): leaves none of the 3 rows in the part to "),
        (few | {"answer": "right"}, "task.answer=right (r.yaml:3): names no column: "),
    ):
        written = json.dumps(task)
        recipe.write_text(f"model: {{path: org/model}}\nreward: number\ntask: {written}\nalgorithm: cppo\n")
        for words in (["explain", "r.yaml"], ["explain", "r.yaml", "--yaml"]):
            assert main(words) == 2
            assert capsys.readouterr().err.startswith(f"error: {line}")


def test_explain_proposes_a_share_that_leaves_no_part_empty(tmp_path):
    for count, proposal in ((1, "nothing (set eval.task; too few questions"), (3, "held_out=0.3,"), (300, "=0.1,")):
        task = rows_file(tmp_path / "t.csv", count)
        text = " ".join(text_of(resolved(task)).split())
        assert f"{proposal}" in text
    share = float(text.partition("task.held_out=")[2].partition(",")[0])
    assert not arithmetic_of(resolved(task | {"held_out": share})).data.refused
    told = "held out: nothing, because eval.task is null"
    assert told in " ".join(text_of(resolved(task | {"held_out": 0.3}, "eval.task=null")).split())


def test_missing_data_are_no_mistake(tmp_path):
    for path in ("none.csv", "none-*.csv"):
        data = arithmetic_of(resolved(PLAIN | {"path": str(tmp_path / path), "held_out": 0.1})).data
        assert (data.refused, data.rows) == (None, {})


def test_a_question_that_is_trained_on_and_evaluated_is_counted(tmp_path):
    trained, asked = rows_file(tmp_path / "a.csv", 30), rows_file(tmp_path / "b.csv", 10)
    lines = arithmetic_of(resolved(trained, eval={"task": asked})).data.notes
    assert lines == (
        "eval.task: 10 of its 10 questions are trained on too; name other questions, or leave eval.task out and set "
        "task.held_out=0.1",
    )
    assert "4 of its 4 " in arithmetic_of(resolved(trained, eval={"task": asked, "limit": 4})).data.notes[0]
    for other in (trained | {"held_out": 0.3, "part": "held_out"}, asked | {"question": "Hm, {question}"}):
        assert arithmetic_of(resolved(trained | {"held_out": 0.3}, eval={"task": other})).data.notes == ()
