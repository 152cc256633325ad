"""Rows without a column `answer`: null where a reward needs none, and told before the run where one does."""

import pytest

from proxima.data import FieldError, UserError
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
