"""Rows without a column `answer`: null where a reward needs none, and told before the run where one does."""

import pytest

from proxima.cli.explain import text_of
from proxima.config import resolve
from proxima.config.explanation import as_json
from proxima.data import FieldError, UserError
from proxima.task.column_mapping import ANSWER
from proxima.task.local_files import Jsonl, Parquet
from tests.prepare.published import write_jsonl, write_parquet

PROMPTS = [{"question": "Say a"}, {"question": "Say b"}]
BOTH = pytest.mark.parametrize(("task", "save"), [(Jsonl, write_jsonl), (Parquet, write_parquet)])


@BOTH
def test_an_absent_column_of_the_default_is_null(tmp_path, task, save):
    answer = task(path=str(save(tmp_path / "rows", PROMPTS)))
    assert [row.answer for row in answer.rows(0)] == [None, None] and answer.lacks_answer(answer.columns())
    held = task(path=str(save(tmp_path / "held", PROMPTS)), metadata=["question"])
    assert [row.answer for row in held.rows(0)] == [None, None]
    there = task(path=str(save(tmp_path / "there", [{"question": "Say a", "answer": "a"}])))
    assert [row.answer for row in there.rows(0)] == ["a"] and not there.lacks_answer(there.columns())


@pytest.mark.parametrize("near", ["Answer", "answers", "anwser"])
def test_a_column_of_a_similar_name_is_no_absent_one(tmp_path, near):
    rows = [{"question": "Say a", near: "a"}]
    with pytest.raises(FieldError, match=f"did you mean '{near}'"):
        Jsonl(path=str(write_jsonl(tmp_path / "rows", rows))).rows(0)


def test_some_rows_with_and_some_without(tmp_path):
    place = str(write_jsonl(tmp_path / "rows", [{"question": "a", "answer": "1"}, {"question": "b"}]))
    with pytest.raises(UserError, match="rows:2 has no column 'answer', which .*rows:1 has; give every row"):
        Jsonl(path=place).rows(0)
    assert [row.answer for row in Jsonl(path=place, answer=None).rows(0)] == [None, None]
    files = write_parquet(tmp_path / "a", PROMPTS), write_parquet(tmp_path / "b", [{"question": "c", "answer": "1"}])
    with pytest.raises(UserError, match="a has no column 'answer', which .*b has"):
        Parquet(path=tuple(map(str, files))).rows(0)


def test_explain_says_that_the_data_has_no_such_column(tmp_path):
    def line(**options):
        text = text_of(resolve("quickstart", [task]), **options)
        return next(line for line in text.splitlines() if line.startswith("task.answer "))

    task = f"task={{kind: jsonl, path: {write_jsonl(tmp_path / 'rows.jsonl', PROMPTS)}}}"
    assert line().split()[1] == "null" and "the data has no such column" in line()
    values = {entry["path"]: entry for entry in as_json(resolve("quickstart", [task]))["values"]}
    assert values["task.answer"]["value"] is None
    write_jsonl(tmp_path / "rows.jsonl", [{"question": "Say a", ANSWER: "a"}])
    assert line(everything=True).split()[1] == "answer"


def test_a_reward_that_needs_an_answer_is_told_so(tmp_path):
    from proxima.reward.runner import RewardRunner
    from proxima.rollout.reference_answers import ReferenceAnswers

    task = f"task={{kind: jsonl, path: {write_jsonl(tmp_path / 'rows.jsonl', PROMPTS)}}}"
    config = resolve("quickstart", [task, "reward={kind: gsm8k}", "eval.task=null"]).config
    answers = ReferenceAnswers(name="task", rows=config.task.rows(0), count=2)
    with pytest.raises(UserError, match="no row has an answer, and the reward gsm8k needs one; set task.answer=COLUMN"):
        config.data.answer_notes(RewardRunner(config.reward), [answers], 1)
    config = resolve("quickstart", [task, "reward={kind: length}", "eval.task=null"]).config
    assert config.data.answer_notes(RewardRunner(config.reward), [answers], 1) == []
