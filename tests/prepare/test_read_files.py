"""Rows of the published forms, right and broken."""

import json
from pathlib import Path

import pytest

from proxima.prepare.read_files import SourceQuestion, inspect_file, iter_source_rows

from .published import lines, math_row, write_dapo, write_jsonl, write_parquet

FORMS = lines(Path(__file__).with_name("forms.jsonl"))  # of published data sets: a row, and what is read of it


def rows_of(*paths):
    return list(iter_source_rows(tuple(inspect_file(path, path.name) for path in paths)))


def only(path):
    (row,) = rows_of(path)
    assert row.reason == ""
    return row.content


@pytest.mark.parametrize("form", FORMS, ids=[form["of"] for form in FORMS])
def test_every_form(tmp_path, form):
    expected = SourceQuestion(**form["read"])
    assert only(write_parquet(tmp_path / "a.parquet", [form["row"]])) == expected
    assert only(write_jsonl(tmp_path / "a.jsonl", [form["row"]])) == expected


@pytest.mark.parametrize("question", [[{"role": "user", "content": "2+2?"}], {"text": "2+2?"}, 4])
def test_a_question_that_is_not_text_is_unreadable(tmp_path, question):
    (row,) = rows_of(write_jsonl(tmp_path / "a.jsonl", [{"question": question, "answer": "4"}]))
    assert row.content is None and "not text" in row.reason


def test_json_files(tmp_path):
    (tmp_path / "1.json").write_text(json.dumps(math_row("1?", 1), indent=2))
    (tmp_path / "2.json").write_text(json.dumps([math_row("2?", 2), math_row("3?", 3)]))
    write_jsonl(tmp_path / "3.json", [math_row("4?", 4), math_row("5?", 5)])
    result = rows_of(*(tmp_path / f"{i}.json" for i in (1, 2, 3)))
    assert [(row.content.question, row.file, row.row) for row in result] == [
        ("1?", 0, 0),
        ("2?", 1, 0),
        ("3?", 1, 1),
        ("4?", 2, 0),
        ("5?", 2, 1),
    ]


SHARED = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"conversations": SHARED}, "2"),
        ({"conversations": SHARED[:2], "answer": "two"}, "two"),
        ({"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}, "2"),
        ({"messages": json.dumps([{"role": "user", "content": "1+1?"}]), "answer": "2"}, "2"),
    ],
)
def test_whole_chats(tmp_path, row, answer):
    assert only(write_jsonl(tmp_path / "a.jsonl", [row])) == SourceQuestion("1+1?", answer)


def test_a_chat_of_several_turns_is_no_question(tmp_path):
    (row,) = rows_of(write_jsonl(tmp_path / "a.jsonl", [{"conversations": SHARED + SHARED[1:]}]))
    assert row.content is None and "the chat has 2 turns of the user, but a question must be a single one" in row.reason


def test_rows_of_another_form_are_not_dropped_in_silence(tmp_path):
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [
            {"prompt": [{"role": "user", "content": "1?"}], "reward_model": {"ground_truth": "1"}},
            {"prompt": [{"role": "user", "content": "2?"}], "reward_model": {}},
            {"prompt": [{"role": "system", "content": "3?"}], "reward_model": {"ground_truth": "1"}},
            {"prompt": [], "reward_model": None},
            {"reward_model": {"ground_truth": "1"}},
        ],
    )
    first, *others = rows_of(path)
    assert first.content.question == "1?" and all(row.content is None for row in others)
    assert [row.reason for row in others[:2]] == [
        "has no 'ground_truth'",
        "has another form: the chat has no user message",
    ]
    assert others[3].reason == "has no 'prompt'"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"question": "1?", "answer": "1"}\n{"question": "2?',
            r"a.jsonl:2 is not JSON: .*was the file cut off",
        ),
        ("a.jsonl", b"[1]\n", r"a.jsonl:1 holds a list, expected an object"),
        (
            "a.jsonl",
            b'{"text": "1?"}\n',
            r"a.jsonl has the columns text; expected a question \(problem, Problem, question, prompt\) and an answer",
        ),
        ("a.jsonl", b"\xff\n", "a.jsonl:1 is not JSON: 'utf-8' codec can't decode"),
        ("a.json", b"[1]", "entry 0 is a number"),
        ("a.parquet", b"PAR1 nothing", "a.parquet can't be read as Parquet: .*: is it truncated"),
    ],
)
def test_damaged_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        rows_of(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_parquet_file_damaged_inside(tmp_path):
    path = write_dapo(
        tmp_path / "d.parquet", [(f"{i} and then some more text {i * 7919}?", "1", str(i)) for i in range(5000)]
    )
    content = bytearray(path.read_bytes())
    content[200 : len(content) // 2] = bytes(len(content) // 2 - 200)
    path.write_bytes(content)
    with pytest.raises(ValueError, match="d.parquet can't be read as Parquet: Corrupt snappy"):
        rows_of(path)
