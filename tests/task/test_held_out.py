"""The part of a task that is held out: which rows are in it, and that training never reads them."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxima.data import FieldError
from proxima.task.held_out_part import is_held_out, question_of, rows_of_part
from proxima.task.hub import Dataset
from proxima.task.local_files import Csv, Files, Jsonl, Parquet
from proxima.task.mix import Mix, WeightedTask, held_out_part
from proxima.task.opening import open_tasks
from proxima.task.protocol import MappedRows, Row, row_place, user_message

QUESTIONS = st.lists(st.text(max_size=8), min_size=1, max_size=40)


def rows_of(questions):
    return MappedRows(questions, lambda index, text: Row(messages=user_message(text), answer=index))


def parts(questions, share):
    """The questions of both parts; an empty one raises."""
    found = {}
    for part in ("train", "held_out"):
        try:
            rows = rows_of_part(rows_of(questions), share, part)
            found[part] = [rows[i].messages[0]["content"] for i in range(len(rows))]
        except FieldError as error:
            assert error.field == "held_out" and f"leaves none of the {len(questions)} row" in str(error)
            found[part] = []
    return found


@given(QUESTIONS, QUESTIONS, st.floats(0.01, 0.99), st.randoms())
def test_the_question_alone_decides(questions, more, share, random):
    split = parts(questions, share)
    assert Counter(split["train"]) + Counter(split["held_out"]) == Counter(questions)
    assert not set(split["train"]) & set(split["held_out"])  # repeats are in one part

    grown = [*more, *questions]
    random.shuffle(grown)
    after = parts(grown, share)
    assert set(split["held_out"]) <= set(after["held_out"]) and set(split["train"]) <= set(after["train"])


@given(QUESTIONS, st.floats(0.01, 0.5), st.floats(1, 1.9))
def test_a_larger_share_holds_out_the_same_and_more(questions, share, factor):
    assert set(parts(questions, share)["held_out"]) <= set(parts(questions, share * factor)["held_out"])


def test_the_order_of_the_data_is_kept_and_the_share_is_met():
    questions = [f"What is {i} + {i * 7}?" for i in range(4000)]
    split = parts(questions, 0.1)
    assert split["train"] == [text for text in questions if text not in set(split["held_out"])]
    assert 340 <= len(split["held_out"]) <= 460  # 3 standard deviations of a binomial


def test_sides_never_move():
    """By value: another hash would train on what earlier runs held out."""
    texts = ["What is 2 + 2?", "What is 3 + 4?", "Name a prime.", "für", "a", "b", "c", "d", "e", "f"]
    assert [text for text in texts if is_held_out(text, 0.3)] == ["Name a prime.", "b", "e", "f"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 2 + 2?", "  What is\n2 + 2 ? "),
        ("What is 2 + 2?", "What is 2 + 2?\nPlease reason step by step, and put your final answer within \\boxed{}."),
        ("x\u200b = 1", "x = 1"),
    ],
)
def test_questions_that_look_the_same_are_the_same(one, other):
    assert all(is_held_out(one, share / 50) == is_held_out(other, share / 50) for share in range(51))


def chat(*turns):
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return Row(messages=tuple({"role": roles[turn[0]], "content": turn[1:]} for turn in turns))


def test_the_answer_of_a_chat_is_no_part_of_its_question():
    assert question_of(chat("uhi", "aone")) == question_of(chat("uhi", "atwo")) == question_of(chat("uhi")) == "hi"
    different = [chat("uhi", "aone", "umore"), chat("uhi", "atwo", "umore"), chat("sBe brief.", "uhi"), chat("umore")]
    assert len({question_of(row) for row in different}) == 4
    longer = [chat("uhi", "aone", "umore", "ax"), chat("uhi", "atwo", "umore", "ay"), chat("uhi", "aone")]
    assert {question_of(row) for row in longer} == {"hi"}  # a pair's two chats, and a chat that another begins with


def test_images_belong_to_the_question(tmp_path):
    (tmp_path / "a.png").write_bytes(b"1")
    (tmp_path / "b.png").write_bytes(b"1")
    (tmp_path / "c.png").write_bytes(b"2")
    asked = [replace(chat("u<image> ?"), images=(str(tmp_path / f"{name}.png"),)) for name in "abc"]
    assert question_of(asked[0]) == question_of(asked[1]) != question_of(asked[2])


def table(folder, count=60):
    rows = [{"question": f"What is {i % 50} + 1?", "answer": str(i % 50 + 1)} for i in range(count)]
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "t.csv").write_text("question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in rows))
    return rows


def kinds(folder):
    import pyarrow as pa
    from pyarrow import parquet

    rows = table(folder)
    parquet.write_table(pa.Table.from_pylist(rows), folder / "t.parquet")
    (folder / "hub").mkdir()
    parquet.write_table(pa.Table.from_pylist(rows), folder / "hub" / "train.parquet")
    files = [
        Csv(path=str(folder / "t.csv"), held_out=0.2),
        Jsonl(path=str(folder / "t.jsonl"), held_out=0.2),
        Parquet(path=str(folder / "t.parquet"), held_out=0.2),
        Files(path=str(folder / "t.parquet"), held_out=0.2, metadata=()),
    ]
    return files, Dataset(path=str(folder / "hub"), held_out=0.2)


def texts(rows):
    return [rows[i].messages[0]["content"] for i in range(len(rows))]


@pytest.mark.slow
def test_every_kind_that_reads_a_table_splits_alike(tmp_path):
    files, dataset = kinds(tmp_path)
    pytest.importorskip("datasets")
    split = [[texts(replace(task, part=part).rows(1)) for part in ("train", "held_out")] for task in (*files, dataset)]
    assert all(each == split[0] for each in split)
    train, held_out = split[0]
    assert len(train) + len(held_out) == 60 and train and held_out and not set(train) & set(held_out)
    everything = replace(files[0], held_out=None).rows(1)
    assert texts(everything) == [f"What is {i % 50} + 1?" for i in range(60)] and everything.about == ""


def test_a_row_keeps_its_place_and_both_parts_read_the_data_once(tmp_path, monkeypatch):
    table(tmp_path)
    task = Jsonl(path=str(tmp_path / "t.jsonl"), held_out=0.2)
    opened = []
    whole = Jsonl.all_rows
    monkeypatch.setattr(Jsonl, "all_rows", lambda self, seed: opened.append(1) or whole(self, seed))
    rows = open_tasks(
        {"task": task, "eval.task": replace(task, part="held_out"), "other": replace(task, answer=None)}, 1
    )
    assert len(opened) == 2  # another mapping of the columns is another reading
    held_out = rows["eval.task"]
    first = texts(held_out)[0]
    line = 1 + next(i for i in range(60) if f"What is {i % 50} + 1?" == first)
    assert row_place(held_out, 0) == f"{tmp_path / 't.jsonl'}:{line}"
    count = len(held_out)
    assert held_out.about == f"{count} of 60 rows, held out by a hash of the question"
    assert rows["task"].about == f"{60 - count} of 60 rows; {count} are held out by a hash of the question"


def test_rows_without_a_question_are_training_rows(tmp_path):
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"question": f"{i}" if i else ""}) + "\n" for i in range(30)))
    task = Jsonl(path=str(tmp_path / "t.jsonl"), held_out=0.3)
    assert len(task.rows(1).unusable) == 1 and len(replace(task, part="held_out").rows(1).unusable) == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"held_out": 0.0}, "held_out"),
        ({"held_out": 1.0}, "held_out"),
        ({"held_out": float("nan")}, "held_out"),
        ({"part": "held_out"}, "part"),
        ({"part": "test", "held_out": 0.1}, "part"),
    ],
)
def test_what_is_refused(fields, message):
    with pytest.raises(FieldError) as refused:
        Csv(path="t.csv", **fields)
    assert (refused.value.field == message and refused.value.remedy) or message == "part"


def test_the_held_out_part_of_a_mix_has_every_row_once(tmp_path):
    table(tmp_path)
    (tmp_path / "u.csv").write_text("question,answer\n" + "".join(f"Is {i} even?,{i % 2}\n" for i in range(200)))
    sums, even = Csv(path=str(tmp_path / "t.csv"), held_out=0.2), Csv(path=str(tmp_path / "u.csv"), held_out=0.1)
    whole = replace(even, held_out=None)
    sources = [(sums, 5.0), (even, 1.0), (whole, 1.0)]
    named = [WeightedTask(name=f"s{i}", task=task, weight=weight) for i, (task, weight) in enumerate(sources)]
    mix = Mix(tasks=named, size=100)
    held_out = held_out_part(mix).rows(1)
    expected = [*texts(held_out_part(sums).rows(1)), *texts(held_out_part(even).rows(1))]
    assert sorted(texts(held_out)) == sorted(expected)
    assert {held_out[i].metadata["source"] for i in range(len(held_out))} == {"s0", "s1"}

    trained = replace(mix, tasks=mix.tasks[:2]).rows(1)
    assert len(trained) == 100 and not set(texts(trained)) & set(expected)
    outer = Mix(tasks=[WeightedTask(name="inner", task=replace(mix, tasks=mix.tasks[:1]))], column="of")
    assert sorted(texts(held_out_part(outer).rows(1))) == sorted(texts(held_out_part(sums).rows(1)))
    assert held_out_part(Mix(tasks=[named[2]])) is None
    with pytest.raises(FieldError, match="needs a source with a part that is held out"):
        Mix(tasks=[named[2]], part="held_out")
