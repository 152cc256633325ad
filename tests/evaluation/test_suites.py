"""Named sets: where their data are found, how the question is put, and the line when there are none."""

import re
from pathlib import Path

import pytest

from proxima.evaluation.suites import SUITES, parse_tasks
from proxima.reward import REWARDS
from proxima.task.local_files import PREPARED
from tests.prepare.published import write_jsonl, write_parquet


@pytest.mark.parametrize("name", sorted(SUITES))
def test_every_suite_is_complete(name):
    single = SUITES[name]
    assert single.name == name and single.max_tokens >= 256
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", single.hub)
    assert REWARDS[single.reward]()
    assert single.template.format().startswith("\n") and "{" not in single.template.replace("{{", "")
    assert name in PREPARED  # the remedy is a command that exists


def test_a_prepared_folder(tmp_path):
    write_jsonl(
        tmp_path / "test.jsonl", [{"question": "How many?", "answer": "3", "level": 2, "solution": "long", "id": "a"}]
    )
    task, place = SUITES["math500"].find(tmp_path, None)
    (row,) = task.rows(0)
    asked = "How many?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert row.messages[0]["content"] == asked
    assert (row.answer, row.metadata, place) == ("3", {"id": "a", "level": 2}, str(tmp_path))


def test_a_raw_copy_of_the_hub(tmp_path):
    """MATH-500 calls the question `problem` and has a worked solution in braces, which is no template."""
    given = {"problem": "What is {1, 2} \\cup {3}?", "answer": "\\{1,2,3\\}", "unique_id": "t/1"}
    write_jsonl(tmp_path / "test.jsonl", [given])
    (row,) = SUITES["math500"].find(tmp_path / "test.jsonl", None)[0].rows(0)
    assert row.messages[0]["content"].startswith("What is {1, 2} \\cup {3}?\nPlease") and row.answer == "\\{1,2,3\\}"


def test_where_data_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert SUITES["aime24"].find(None, None)[1] == "HuggingFaceH4/aime_2024"  # nothing here: the hub
    write_jsonl(tmp_path / "data" / "aime24" / "test.jsonl", [{"question": "a", "answer": "1"}])
    assert SUITES["aime24"].find(None, None)[1] == "data/aime24"
    write_jsonl(tmp_path / "mine" / "aime24" / "test.jsonl", [{"question": "a", "answer": "1"}])
    assert SUITES["aime24"].find(None, tmp_path / "mine")[1].endswith("mine/aime24")
    assert SUITES["aime24"].find(None, tmp_path / "mine" / "aime24")[1].endswith("mine/aime24")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("")
    for path, folder, message in (
        (None, tmp_path / "mine", "has no gsm8k/test.parquet; download the data with: proxima data prepare gsm8k"),
        (tmp_path / "empty", None, "has no test.parquet or test.jsonl"),
        (tmp_path / "notes.txt", None, r"must be a .parquet, .jsonl, .*, .tsv file, possibly with .gz, or a folder"),
    ):
        with pytest.raises(ValueError, match=message):
            SUITES["gsm8k"].find(path, folder)


def test_the_hubs_own_split_files(tmp_path):
    write_parquet(tmp_path / "main" / "test-00000-of-00001.parquet", [{"question": "a", "answer": "b\n#### 1"}])
    (row,) = SUITES["gsm8k"].find(tmp_path, None)[0].rows(0)
    assert row.messages[0]["content"] == "a\nThink step by step, then give the final number after ####."


def test_parsing_names(tmp_path):
    given = parse_tasks(["gsm8k,aime24", " math500 = x/y "])
    assert given == {"gsm8k": None, "aime24": None, "math500": Path("x/y")}
    for wrong in ("gsm8k,,aime24", ""):
        with pytest.raises(ValueError, match="must name evaluation sets"):
            parse_tasks([wrong])
    with pytest.raises(ValueError, match="names gsm8k twice"):
        parse_tasks(["gsm8k", "gsm8k=x"])
