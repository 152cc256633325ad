"""`proxima init --data`: a recipe and a reward for the columns of a file."""

import json
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import yaml

from proxima.cli.own_data import ANSWERS, QUESTIONS, find_columns, grading_of, written
from proxima.cli.starter.own_data.right_number import right_number
from proxima.cli.starter.own_data.right_words import right_words
from proxima.cli.starter.own_data.shared_words import shared_words
from proxima.config.resolution import resolve

CAPITALS = {"Norway": "Oslo", "Peru": "Lima", "India": "New Delhi", "Chad": "N'Djamena", "Cuba": "Havana"}
SMALL = ("train.steps=2", "train.prompts_per_step=2", "engine.dtype=float32", "model.compute_dtype=float32")
VARIED = "reward.1={kind: format, pattern: '[!-?]', weight: 0.1}"  # so tiny a model is never right


def capitals(times=1):
    rows = [(f"What is the capital of {land}?", city) for land, city in CAPITALS.items()]
    return [(f"{question} ({number})", city) for number in range(times) for question, city in rows]


def write(path, questions, answers, rows, **more):
    """Write rows of these two columns, and of `more`, in the format of the file's suffix."""
    table = [{questions: question, answers: answer} | more for question, answer in rows]
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(table), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")
    else:
        cells = [list(table[0]), *([str(cell) for cell in row.values()] for row in table)]
        lines = (",".join('"' + cell.replace('"', '""') + '"' for cell in line) for line in cells)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_what_it_writes_runs(here, done, proxima, monkeypatch, tiny_model, suffix):
    write(here / f"my.{suffix}", "Question", "Answer", capitals(8), land="any")
    out = done("init", "mine", "--data", f"my.{suffix}")
    assert out.splitlines() == [
        f"my.{suffix}: 40 rows; the question is 'Question', the answer 'Answer': "
        "'What is the capital of Norway? (0)' → 'Oslo'",
        "8 of 40 rows are held out (by a hash of the question) and only evaluated",
        "wrote mine/recipe.yaml",
        "wrote mine/reward.py",
        "",
        "cd mine && proxima train recipe.yaml",
    ]
    assert "# A parameter with the name of a column gets its value: land" in Path("mine/reward.py").read_text()
    monkeypatch.chdir(here / "mine")
    model = f"model.path={tiny_model('llama')}"
    shown = " ".join(done("explain", "recipe.yaml", model, "--all").split())  # lines break by the length of paths
    assert f"../my.{suffix}" in shown and "right_words" in shown and "held out: " in shown
    code, _, err = proxima("train", "recipe.yaml", *SMALL, VARIED, model, "folder=run", "--quiet")
    assert (code, err) == (0, "")
    evaluated = json.loads(Path("run/summary.json").read_text(encoding="utf-8"))["eval"]["after"]["questions"]
    assert f"held_out: 0.2          # a hash of the question chooses these {evaluated};" in Path(
        "recipe.yaml"
    ).read_text(encoding="utf-8")
    rows = parquet.read_table(next(Path("run/rollouts").glob("*.parquet"))).to_pylist()
    assert {row["valid"] for row in rows} == {True}


def test_the_model_of_this_folder_is_not_downloaded_again(here, done):
    (here / "models" / "smollm2-135m-instruct").mkdir(parents=True)
    write(here / "my.csv", "question", "answer", capitals())
    done("init", "deep/mine", "--data", "my.csv")
    done("init", "other")
    for folder, model in (("deep/mine", "../../models"), ("other", "../models")):
        recipe = yaml.safe_load(Path(folder, "recipe.yaml").read_text())
        assert recipe["model"]["path"] == f"{model}/smollm2-135m-instruct"


def test_it_refuses_in_one_line_and_writes_nothing(here, refusal):
    write(here / "my.csv", "frage", "antwort", capitals(), nummer=1)
    columns = "columns: frage, antwort, nummer"
    remedy = "name --question COLUMN and --answer COLUMN"
    what = "can't tell which column of my.csv is the question and which the answer"
    assert refusal("init", "a", "--data", "my.csv") == f"error: {what}; {columns}; {remedy}"
    half = refusal("init", "a", "--data", "my.csv", "--question", "frage")
    assert half == f"error: can't tell which column of my.csv is the answer; {columns}; name --answer COLUMN"
    assert "did you mean 'antwort'" in refusal("init", "a", "--data", "my.csv", "--question=frage", "--answer=antwrt")
    assert "--data='none.csv' names no file" in refusal("init", "a", "--data", "none.csv")
    assert "--question='was' names no column" in refusal("init", "a", "--data", "my.csv", "--question", "was")
    wrong = refusal("init", "a", "--data", "my.csv", "--question", "{was}?", "--answer", "antwort")
    assert "--question='{was}?' names no column" in wrong
    assert "--data FILE" in refusal("init", "a", "--question", "frage")
    write(here / "gaps.csv", "question", "answer", [*capitals(), ("And?", "")])
    missing = "gaps.csv: 1 of 6 rows has no value in 'answer', the first at 'And?'"
    assert missing in refusal("init", "a", "--data", "gaps.csv")
    assert not (here / "a").exists()


def test_too_few_questions_are_all_trained_on(here, done):
    write(here / "my.csv", "question", "answer", capitals()[:2])
    out = done("init", "--data", "my.csv")
    assert "too few questions to hold some out: all rows are trained on, and nothing is evaluated" in out
    assert "  # held_out: 0.3 " in (here / "recipe.yaml").read_text(encoding="utf-8")
    assert "held out: nothing" in done("explain", "recipe.yaml")


def test_columns_that_are_named_are_taken(here, done):
    write(here / "my.csv", "frage, kurz", "antwort: #1", capitals(), nummer=1)
    done("init", "--data", "my.csv", "--question", "frage, kurz", "--answer", "antwort: #1")
    task = yaml.safe_load((here / "recipe.yaml").read_text())["task"]
    named = {"kind": "csv", "path": "my.csv", "question": "frage, kurz", "answer": "antwort: #1"}
    assert task == named | {"held_out": 0.3}


def test_it_says_how_many_questions_differ_and_which_other_columns_fit(here, done):
    write(here / "my.csv", "question", "answer", [*capitals(), *capitals()[:2]], problem="p", target="t", n=1)
    lines = done("init", "a", "--data", "my.csv").splitlines()
    assert lines[0].startswith("my.csv: 7 rows, 5 different questions; the question is 'question', the answer 'answer'")
    assert lines[2:4] == [
        "the question is 'question'; if it is 'problem', add --question problem",
        "the answer is 'answer'; if it is 'target', add --answer target",
    ]
    lines = done("init", "b", "--data", "my.csv", "--question", "question", "--answer", "answer").splitlines()
    assert lines[2] == "wrote b/recipe.yaml"


ASKED = {"role": "user", "content": "2 + 2?"}
SAID = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("row", "recipe", "task"),
    [
        ({"messages": [ASKED, SAID]}, "cpu/sft", "messages: messages"),
        ({"messages": [ASKED, SAID], "id": 1}, "cpu/sft", "messages: messages"),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}, "cpu/sft", "messages:"),
        ({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, "cpu/dpo", "question: prompt"),
        ({"chosen": [ASKED, SAID], "rejected": [ASKED, SAID]}, "cpu/dpo", "messages: chosen"),
        ({"prompt": [ASKED], "Chosen": "4", "rejected": "5"}, "cpu/dpo preference.chosen=Chosen", "messages: prompt"),
        ({"prompt": "2 + 2?", "completion": "4", "label": True}, "cpu/dpo preference.loss=kto", "question: prompt"),
    ],
)
def test_a_file_of_another_training_names_the_command_that_trains_on_it(here, refusal, proxima, row, recipe, task):
    Path("my.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    line = refusal("init", "a", "--data", "my.jsonl")
    command = line.partition("train on it with proxima ")[2].partition(", or name the column with --answer COLUMN")[0]
    assert command.startswith(f"train {recipe.partition(' ')[0]} data.system=null eval.task=null")
    assert all(word in command for word in recipe.split()) and task in command
    name, *overrides = shlex.split(command)[1:]
    resolved = resolve(name, overrides, root=None)
    assert len(resolved.config.task.rows(0)) == 4


@pytest.mark.parametrize("text", ["What is 1 + 1?,2\nWhat is 2 + 2?,4\n", "0,What is 0 + 0?,0\n1,What is 1 + 0?,1\n"])
def test_a_file_without_a_header_is_told(here, refusal, text):
    Path("my.csv").write_text(text)
    line = refusal("init", "a", "--data", "my.csv")
    assert "my.csv seems to have no header line: its first line is" in line
    assert line.endswith("add a line above it that names the columns, such as question,answer")


CHAT = [{"role": "user", "content": "2 + 2?"}]


@pytest.mark.parametrize(
    ("row", "field", "question", "answer"),
    [
        ({"id": 1, "Problem": "2 + 2?", "Solution": "4"}, "question", "Problem", "Solution"),
        ({"problem": "2 + 2?", "solution": "It is 4.", "answer": "4"}, "question", "problem", "answer"),
        ({"question": "2 + 2?", "what": "4"}, "question", "question", "what"),
        ({"what": "2 + 2?", "Final Answer": "4"}, "question", "what", "Final Answer"),
        ({"prompt": CHAT, "reward_model": {"ground_truth": "4"}}, "messages", "prompt", "reward_model.ground_truth"),
        ({"messages": CHAT, "label": "4", "n": 1}, "messages", "messages", "label"),
        ({"instruction": "Add", "input": "2, 2", "output": "4"}, "question", "{instruction}\n{input}", "output"),
    ],
)
def test_columns_are_told_by_their_names(row, field, question, answer):
    columns = find_columns("my.csv", row, None, None)
    assert (columns.field, columns.question, columns.answer) == (field, question, answer)


def test_no_name_is_both():
    assert not set(QUESTIONS) & set(ANSWERS)


@pytest.mark.parametrize(
    ("answers", "function", "brief"),
    [
        (["12", "-3.5", "$1,200"], "right_number", True),
        ([12, 3], "right_number", True),
        (["01234", "98765"], "right_words", True),
        (["He has 3 + 4.\n#### 7", "So it is\n#### 1,000"], "right_number", False),
        (["Paris", "New York"], "right_words", True),
        ([["Paris", "paname"], ["Rome"]], "right_words", True),
        ([True, False], "right_words", True),
        (["12", "a dozen"], "right_words", True),
        (["Because " * 20, "In the end " * 9], "shared_words", False),
    ],
)
def test_the_reward_is_for_such_answers(answers, function, brief):
    grading = grading_of(answers)
    assert (grading.function, grading.system is not None) == (function, brief)
    assert 16 <= grading.max_tokens <= 512
    assert grading.max_tokens >= max(len(str(answer)) for answer in answers) / 4


@pytest.mark.parametrize(
    ("reward", "completion", "answer", "value"),
    [
        (right_number, "2 + 2 is 4.", "4", 1.0),
        (right_number, "It is $1,200", "So\n#### 1200.0", 1.0),
        (right_number, "-4", "4", 0.0),
        (right_number, "four", "4", 0.0),
        (right_words, "New York.", "new york", 1.0),
        (right_words, "It is New York", "New York", 0.75),
        (right_words, "New York or Paris", "New York", 0.0),
        (right_words, "Paname!", ["Paris", "Paname"], 1.0),
        (right_words, "", "Paris", 0.0),
        (right_words, "It is C++.", "C++", 0.8),
        (right_words, "C", "C++", 0.0),
        (right_words, "C", "C#", 0.0),
        (right_words, "F#", "f#", 1.0),
        (right_words, "5", "-5", 0.0),
        (right_words, "It is -5.", "-5", 0.75),
        (right_words, "2020-01-05", "2020-01-05", 1.0),
        (right_words, "**Paris**", "Paris", 1.0),
        (right_words, "`Paris`", "Paris", 1.0),
        (right_words, "👍", "👍", 1.0),
        (right_words, "❤\ufe0f", "❤", 1.0),
        (right_words, "🎉", "👍", 0.0),
        (right_words, " + ", "+", 1.0),
        (right_words, "*", "*", 1.0),
        (right_words, "/", "*", 0.0),
        (right_words, "का", "की", 0.0),
        (right_words, "हिन्दी।", "हिन्दी", 1.0),
        (right_words, "cafe\u0301", "café", 1.0),
        (shared_words, "का है", "की है", 0.5),
        (shared_words, "the cat sat", "The cat sat.", 1.0),
        (shared_words, "the cat", "the dog", 0.5),
        (shared_words, "", "the dog", 0.0),
    ],
)
def test_the_rewards(reward, completion, answer, value):
    given = reward(completion, answer)
    if isinstance(given, dict):
        assert given["correct"] == (value > 0)
        given = given["value"]
    assert given == pytest.approx(value)


@pytest.mark.parametrize(
    "name", ["a", "a b", "yes", "1", "a: b", "a #b", "#a", "[a]", "a, b", "null", "é", 'q"', "a\nb"]
)
def test_a_name_is_read_back(name):
    assert yaml.safe_load(f"column: {written(name)}") == {"column": name}
