"""JSONL and Parquet: columns, templates, and what may be wrong with a file."""

import json
from datetime import date
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from proxima.data import UserError
from proxima.task.local_files import Jsonl, Parquet
from proxima.task.opening import open_tasks
from proxima.task.protocol import EmptyPromptError
from tests.prepare.published import write_jsonl, write_parquet

ROWS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i), "hint": "add", "level": i} for i in range(5)]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


WRITERS = {Jsonl: (write_jsonl, "jsonl"), Parquet: (write_parquet, "parquet")}
both = pytest.mark.parametrize("cls", [Jsonl, Parquet])


def written(cls, folder, rows, name="data"):
    write, suffix = WRITERS[cls]
    return str(write(folder / f"{name}.{suffix}", rows))


def user(text):
    return ({"role": "user", "content": text},)


@both
def test_templates_over_several_columns_which_all_reach_the_rewards(cls, tmp_path):
    path = written(cls, tmp_path, ROWS)
    row = cls(path=path, question="{question}\n({hint}, {level}) {{x}}", answer="{answer}!").rows(1)[3]
    assert (row.messages, row.answer, row.metadata) == (user("What is 3 + 3?\n(add, 3) {x}"), "6!", ROWS[3])
    assert cls(path=path, metadata=()).rows(1)[3].metadata == {}


@both
def test_nested_columns_and_chats(cls, tmp_path):
    path = written(cls, tmp_path, [{"prompt": CHAT, "reward_model": {"ground_truth": "42", "style": "rule"}}])
    row = cls(path=path, messages="prompt", answer="reward_model.ground_truth", metadata=("reward_model",)).rows(1)[0]
    assert (row.messages, row.answer) == (tuple(CHAT), "42")
    assert row.metadata == {"reward_model": {"ground_truth": "42", "style": "rule"}}


@both
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"question": "qestion"},
            r"question='qestion' names no column: .*; did you mean 'question'\?; columns: question, answer, hint",
        ),
        (
            {"answer": "zzz"},
            r"answer='zzz' names no column: .* has no column 'zzz'; set it to one that exists, or null for no answers; "
            r"columns: question, answer, hint, level",
        ),
        ({"question": "{question} {tip}"}, r"question='.*' names no column: .* has no column 'tip'"),
        ({"metadata": ("source",)}, r"metadata=.* has no column 'source'"),
        ({"messages": "chat"}, r"messages='chat' names no column: .* has no column 'chat'"),
    ],
)
def test_an_absent_column_is_named(cls, tmp_path, fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        cls(path=written(cls, tmp_path, ROWS), **fields).rows(1)
    assert "data." in str(caught.value) and "\n" not in str(caught.value)


@both
def test_several_files_and_patterns(cls, tmp_path):
    for i in range(3):
        written(cls, tmp_path, ROWS[i : i + 1], f"part-{i}")
    suffix = WRITERS[cls][1]

    def answers(path):
        rows = cls(path=path).rows(1)
        return [rows[i].answer for i in range(len(rows))]

    assert answers(f"{tmp_path}/part-*.{suffix}") == ["0", "2", "4"]
    assert answers((f"{tmp_path}/part-2.{suffix}", f"{tmp_path}/part-0.{suffix}")) == ["4", "0"]


@both
def test_no_file_no_rows(cls, tmp_path):
    with pytest.raises(ValueError, match="names no file"):
        cls(path=str(tmp_path / "nope.jsonl")).rows(1)
    with pytest.raises(ValueError, match="names no file"):
        cls(path=str(tmp_path / "*.nope")).rows(1)
    with pytest.raises(ValueError, match="is a folder; name its files"):
        cls(path=str(tmp_path)).rows(1)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    parquet.write_table(
        pa.table({"question": pa.array([], pa.string()), "answer": pa.array([], pa.string())}),
        tmp_path / "empty.parquet",
    )
    with pytest.raises(ValueError, match="path='.*empty.*' holds no rows"):
        cls(path=str(tmp_path / f"empty.{WRITERS[cls][1]}")).rows(1)
    with pytest.raises(ValueError, match="path='' must name a file"):
        cls(path="")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "a", "answ', r"data.jsonl:3 is not JSON: .*; repair or remove the line"),
        ("[1, 2]", "data.jsonl:3 holds a list, expected an object"),
        (
            '{"question": "a"}',
            "data.jsonl:3 has no column 'answer', which .*data.jsonl:1 has; give every row an answer",
        ),
        ("\udcff", "data.jsonl:3 is not JSON"),
        (
            '{"question": "a"}\r{"question": "b"}',
            r"data.jsonl:3 is not JSON: .*; if its lines end in \\r alone, rewrite",
        ),
    ],
)
def test_a_broken_line_is_named_at_once(tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    good = json.dumps(ROWS[0])
    path.write_bytes(f"{good}\n\n{line}\n{good}\n".encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message) as caught:
        Jsonl(path=str(path)).rows(1)
    assert "\n" not in str(caught.value)


@both
@pytest.mark.parametrize("field", ["question", "messages"])
def test_a_row_without_a_prompt_can_be_skipped(cls, field, tmp_path):
    """What opens the data decides: training on questions refuses it at once, where the file is read at once."""
    prompt = "a" if field == "question" else [{"role": "user", "content": "a"}]
    columns = [{field: value, "answer": "1"} for value in (prompt, None, prompt[:0], prompt)]
    task = cls(path=written(cls, tmp_path, columns), **({} if field == "question" else {"messages": "messages"}))
    rows = open_tasks({"task": task}, 1, may_skip=True)["task"]
    assert [rows[i].answer for i in (0, 3)] == ["1", "1"]
    for i in (1, 2):
        with pytest.raises(EmptyPromptError, match=f"{field}=.* is empty; remove .*data.*, or map another column"):
            rows[i]
    if cls is Jsonl:
        with pytest.raises(UserError, match=f"task: a row has an empty {field}; remove .*data.jsonl:2, or map"):
            open_tasks({"task": task}, 1)


def test_half_an_emoji_in_a_line(tmp_path):
    """Scraped text that was cut in the middle of one: json reads it, no tokenizer takes it."""
    (tmp_path / "rows.jsonl").write_text(
        r'{"question": "a \ud83d b \ud83d\ude00", "answer": {"k\udfff": ["\ud800"]}}' + "\n"
    )
    row = Jsonl(path=str(tmp_path / "rows.jsonl")).rows(0)[0]
    assert row.messages[0]["content"] == "a ? b \U0001f600" and row.answer == {"k?": ["?"]}
    raw = '{"question": "a \ud83d 한", "answer": {"k\udfff": ["\ud800"]}}\n'.encode("utf-8", "surrogatepass")
    (tmp_path / "rows.jsonl").write_bytes(raw)
    row = Jsonl(path=str(tmp_path / "rows.jsonl")).rows(0)[0]
    assert row.messages[0]["content"] == "a ? 한" and row.answer == {"k?": ["?"]}


def test_a_row_may_be_nested_a_hundred_levels(tmp_path):
    def rows(levels):
        answer = "[" * (levels - 1) + "]" * (levels - 1)  # the row itself is a level
        (tmp_path / "rows.jsonl").write_text(f'{{"question": "a", "answer": {answer}}}\n')
        return Jsonl(path=str(tmp_path / "rows.jsonl")).rows(0)

    assert len(rows(100)) == 1
    for levels in (101, 500):
        with pytest.raises(
            ValueError, match="rows.jsonl:1 is nested deeper than 100 levels; flatten or remove the line"
        ):
            rows(levels)
    with pytest.raises(ValueError, match="rows.jsonl:1 is nested deeper than 100 levels"):
        rows(200_000)
    many = [[i] for i in range(300)]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "a", "answer": many}) + "\n")
    assert Jsonl(path=str(tmp_path / "rows.jsonl")).rows(0)[0].answer == many


def test_lines_of_any_length_blank_lines_and_no_last_line_end(tmp_path):
    rows = [{"question": "ü" * n, "answer": n} for n in (1, 100_000, 3)]
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n\r\n" + b"\r\n \r\n".join(json.dumps(row, ensure_ascii=False).encode() for row in rows))
    read = Jsonl(path=str(path)).rows(1)
    assert [(len(read[i].messages[0]["content"]), read[i].answer) for i in (2, 1, 0)] == [
        (3, 3),
        (100_000, 100_000),
        (1, 1),
    ]


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ("Hi", r"column 'chat' holds text, expected a list of \{role, content\}"),
        ([{"role": "robot", "content": "Hi"}], "expected a role among system, user, assistant"),
        ([{"role": "user"}], "expected a role among"),
        ([{"role": "user", "content": 3}], "and a text content"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a part of type 'image', which the model would not see"),
    ],
)
def test_a_chat_that_is_none(tmp_path, chat, message):
    with pytest.raises(ValueError, match=message):
        Jsonl(path=written(Jsonl, tmp_path, [{"chat": chat}]), messages="chat", answer=None).rows(1)


@both
def test_images_are_shown_or_for_the_rewards_and_never_dropped(cls, tmp_path):
    path = written(cls, tmp_path, [ROWS[0] | {"images": ["cat.png"]}])
    with pytest.raises(ValueError, match=r"has a column 'images', which the model would not see; show it with images="):
        cls(path=path).rows(1)
    assert cls(path=path, metadata=("images",)).rows(1)[0].metadata == {"images": ["cat.png"]}
    row = cls(path=path, images="images").rows(1)[0]
    assert "images" not in row.metadata
    assert row.images == (str(tmp_path / "cat.png") if cls is Jsonl else "cat.png",)
    if cls is Jsonl:  # an empty list is none
        assert len(cls(path=written(cls, tmp_path, [ROWS[0] | {"images": []}, ROWS[1]])).rows(1)) == 2


def test_parts_of_messages_are_texts_and_images(tmp_path):
    parts = [{"type": "text", "text": "left "}, {"type": "image", "path": "a.png"}, {"type": "text", "text": " right"}]
    path = written(Jsonl, tmp_path, [{"chat": [{"role": "user", "content": parts}], "answer": "1"}])
    row = Jsonl(path=path, messages="chat", images="chat").rows(1)[0]
    assert (row.messages, row.images) == (user("left <image> right"), (str(tmp_path / "a.png"),))
    with pytest.raises(ValueError, match=r"a part of type 'image'.* images=chat shows it"):
        Jsonl(path=path, messages="chat").rows(1)


def test_values_that_json_cannot_hold_become_text(tmp_path):
    path = written(
        Parquet, tmp_path, [{"question": 7, "answer": date(2024, 2, 29), "raw": b"abc", "nan": float("nan")}]
    )
    row = Parquet(path=path, question="{question}", metadata=("raw", "nan")).rows(1)[0]
    assert (row.messages, row.answer, row.metadata) == (user("7"), "2024-02-29", {"raw": "abc", "nan": None})
    json.dumps(row.metadata)


def test_numbers_that_are_not_finite_are_missing(tmp_path):
    """Tables and Python's JSON have them where a number is missing: no answer may be the text nan."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1?", "answer": NaN, "more": [Infinity, 2.5]}\n')
    (row,) = Jsonl(path=str(path)).rows(1)
    assert (row.answer, row.metadata["more"]) == (None, [None, 2.5])
    with pytest.raises(EmptyPromptError, match="question=None is empty"):
        Jsonl(path=str(path), question="{answer}").rows(1)[0]


def test_a_template_without_values_is_no_question(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("question,hint,answer\n,,4\n,count,5\n")
    rows = Jsonl(path=str(path), question="{question} {hint}\nThink.").rows(1)
    assert len(rows.unusable) == 1 and rows[1].messages == user(" count\nThink.")
    with pytest.raises(EmptyPromptError, match="question=None is empty; remove .*rows.csv:2"):
        rows[0]


def test_a_torn_parquet_file_is_named(tmp_path):
    path = Path(written(Parquet, tmp_path, ROWS))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="data.parquet can't be read as Parquet: ") as caught:
        Parquet(path=str(path)).rows(1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", ["{", "{}", "{a[0]}", "{question"])
def test_a_bad_template(template):
    with pytest.raises(ValueError, match="^question="):
        Jsonl(path="x.jsonl", question=template)


@both
def test_a_tilde_is_the_home_folder(cls, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    name = written(cls, tmp_path, ROWS).removeprefix(str(tmp_path))
    assert len(cls(path=f"~{name}").rows(1)) == len(cls(path=f"~{name.replace('data', 'd*a')}").rows(1)) == 5


def test_a_row_says_whether_its_prompt_is_a_list_of_messages(tmp_path):
    """However the messages are written, wherever they are, and whether or not rewards get the column."""
    named = [{"role": "user", "content": "Hi", "name": None}]
    data = [{"asked": named, "as_json": json.dumps(named), "nested": {"chat": named}, "question": "Hi"}]
    path = written(Jsonl, tmp_path, data)
    for column in ("asked", "as_json", "nested.chat"):
        assert Jsonl(path=path, messages=column, answer=None, metadata=()).rows(1)[0].chat
    assert not Jsonl(path=path, answer=None).rows(1)[0].chat


PROMPTS = [{"question": "Say a"}, {"question": "Say b"}]


@both
def test_an_answer_is_null_where_the_data_have_none(cls, tmp_path):
    path = written(cls, tmp_path, PROMPTS)
    for task in (cls(path=path), cls(path=path, metadata=["question"])):
        assert [row.answer for row in task.rows(0)] == [None, None] and task.lacks_answer(task.columns())
    there = cls(path=written(cls, tmp_path, ROWS, "there"))
    assert not there.lacks_answer(there.columns())


@pytest.mark.parametrize("near", ["Answer", "answers", "anwser"])
def test_a_column_of_a_similar_name_is_no_absent_one(tmp_path, near):
    with pytest.raises(ValueError, match=f"did you mean '{near}'"):
        Jsonl(path=written(Jsonl, tmp_path, [{"question": "Say a", near: "a"}])).rows(0)


def test_files_with_and_without_answers(tmp_path):
    paths = written(Parquet, tmp_path, PROMPTS, "a"), written(Parquet, tmp_path, ROWS, "b")
    with pytest.raises(UserError, match="a.parquet has no column 'answer', which .*b.parquet has"):
        Parquet(path=paths).rows(0)
    some = written(Jsonl, tmp_path, [ROWS[0], PROMPTS[0]])
    assert [row.answer for row in Jsonl(path=some, answer=None).rows(0)] == [None, None]


CHAT = [{"role": "user", "content": "Hi"}]


@both
@pytest.mark.parametrize(
    ("value", "mapped", "why"),
    [
        (CHAT, {}, "holds a list of messages, but a question must be text: .*; map it with messages=question"),
        (CHAT, {"question": "{question}"}, "holds a list of messages, .*; map it with messages=question"),
        (json.dumps(CHAT), {}, "holds a list of messages, .*; map it with messages=question"),
        (json.dumps(CHAT), {"prompt": "question"}, "holds a list of messages, .*; map it with messages=question"),
        ({"text": "Hi"}, {}, "holds an object, .*; name the part of it that is the question, as in .*.text"),
        ({"text": "Hi"}, {"question": "{question}"}, "holds an object, "),
        (["Hi", "there"], {}, r"holds a list, .*; write it as text, or question='\{question\}' to ask it as JSON"),
        (7, {}, "holds a number, "),
        (1.5, {}, "holds a number, "),
        (True, {}, "holds a boolean, "),
    ],
)
def test_a_question_that_is_not_text_is_refused(cls, tmp_path, value, mapped, why):
    """It would be asked as JSON, a whole chat as one turn of the user."""
    with pytest.raises(UserError, match=f"column .*{why}") as caught:
        cls(path=written(cls, tmp_path, [{"question": value}]), **mapped).rows(0)[0]
    assert "\n" not in str(caught.value)


def test_a_template_may_hold_numbers_and_lists_of_texts(tmp_path):
    path = written(Jsonl, tmp_path, [{"n": 7, "of": ["a", "b"]}])
    assert Jsonl(path=path, question="{n} {of}").rows(0)[0].messages == user('7 ["a", "b"]')


def test_a_prompt_is_a_chat_or_a_text_as_the_row_has_it(tmp_path):
    system = {"role": "system", "content": "Be brief."}
    path = written(Jsonl, tmp_path, [{"prompt": [system, *CHAT], "answer": "a"}, {"prompt": "Hi", "answer": "b"}])
    chat, text = Jsonl(path=path, prompt="prompt").rows(0)
    assert (chat.messages, chat.chat) == ((system, *CHAT), True)
    assert (text.messages, text.chat) == (({"role": "user", "content": "Hi", "raw": True},), False)
    with pytest.raises(ValueError, match="prompt='prompt' and messages both name the prompt; set one of them to null"):
        Jsonl(path=path, prompt="prompt", messages="prompt")
    with pytest.raises(UserError, match="a row has an empty prompt; remove .*, or map another column than .prompt."):
        open_tasks({"task": Jsonl(path=written(Jsonl, tmp_path, [{"prompt": ""}]), prompt="prompt")}, 0)
