"""What `proxima init --data` writes: a recipe and a reward for the columns of a user's file."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any, Literal

import yaml

from proxima.data import FieldError, UserError
from proxima.reward.math.marked import as_number
from proxima.task.column_mapping import is_chat
from proxima.task.file_formats import data_suffix
from proxima.task.local_files import Csv, Files, Jsonl, Parquet, find_files
from proxima.task.protocol import Row, Rows, unusable_rows
from proxima.view.formatting import count, printable

TEMPLATES = Path(__file__).parent / "starter" / "own_data"
KINDS: dict[str, tuple[str, type[Files]]] = {
    ".csv": ("csv", Csv),
    ".tsv": ("csv", Csv),
    ".jsonl": ("jsonl", Jsonl),
    ".ndjson": ("jsonl", Jsonl),
    ".parquet": ("parquet", Parquet),
}
# Names of columns in lower case, with `_` between words; of several the first is taken.
QUESTIONS = (
    "question", "problem", "query", "prompt", "instruction", "input", "user_prompt", "user_message", "question_text",
    "q", "messages", "conversations", "conversation", "chat", "dialog",
)  # fmt: skip
ANSWERS = (
    "answer", "final_answer", "expected_answer", "correct_answer", "ground_truth", "reward_model", "answers", "target",
    "gold", "label", "expected", "reference", "solution", "output", "response", "completion", "result", "answer_text",
    "a",
)  # fmt: skip
READ = 10_000  # rows, evenly spaced, whose answers are looked at
MANY_WORDS = 12  # from which an answer is a text that can't be compared word by word
LONGEST = 512  # tokens of a completion
EVALUATION = """\
eval:                       # before and after training, and every 10 steps, on the held-out part
  every: 10

"""
SHARES = {200: 0.1, 40: 0.2, 0: 0.3}  # rows from which such a share of them is held out


@dataclass(frozen=True)
class QuestionAndAnswer:
    """The columns of a file that are read.

    Args:
        field: the field of the task that names the question's column: `question`, or `messages` for chats.
        question: its value, a column or a template over several.
        answer: the column of the answer, with dots into objects.
    """

    field: Literal["question", "messages"]
    question: str
    answer: str


@dataclass(frozen=True)
class Grading:
    """How the answers of a file can be graded, and the settings that follow.

    Args:
        function: the function of reward.py, and its module in `starter/own_data`.
        system: the system prompt of rows without one.
        max_tokens: tokens of a completion.
        why: the reason for that number.
    """

    function: str
    system: str | None
    max_tokens: int
    why: str


def starter_for(data: str, folder: Path, model: str, *, question: str | None, answer: str | None) -> dict[str, str]:
    """Return the contents of recipe.yaml and reward.py for a user's data, and print which columns they read.

    Args:
        data: a file, or a pattern.
        folder: where the files will be written; the recipe is trained there.
        model: `model.path` of the recipe.
        question, answer: the columns; None: told by their names.

    Raises:
        UserError, FieldError: the file can't be read, has no such columns, or has rows without an answer; or the names
            of its columns don't tell which is the question and which the answer.
    """
    kind, task_class = KINDS.get(data_suffix(find_files(data)[0]), ("files", Files))
    source = task_class(path=data, answer=None)
    present = source.columns()
    first = source.first()
    if not present or first is None:
        raise UserError(f"{data} has no rows")
    columns = find_columns(data, first, question, answer)
    chosen: dict[str, Any] = {columns.field: columns.question, "answer": columns.answer}
    task = task_class(path=data, **chosen)
    rows = task.rows(0)
    for error in unusable_rows(rows):
        raise error
    read = some_rows(rows)
    require_answers(data, columns.answer, read)
    grading = grading_of([row.answer for row in read])
    held_out, trained, evaluation = held_out_settings(task, len(rows))
    values = {
        "data": printable(data),
        "model": written(model),
        "kind": kind,
        "path": written(data if os.path.isabs(data) or data.startswith("~") else os.path.relpath(data, folder)),
        "prompt": prompt_line(columns, present),
        "answer": written(columns.answer),
        "held_out": held_out,
        "system": "null" if grading.system is None else grading.system,
        "function": grading.function,
        "max_tokens": f"{grading.max_tokens:<17} # {grading.why}",
        "prompts": str(min(8, trained)),
        "evaluation": evaluation,
    }
    example = printable(f"{excerpt_of(read[0].messages[-1]['content'])} → {excerpt_of(read[0].answer)}")
    named = f"the question is {columns.question!r}, the answer {columns.answer!r}"
    print(printable(f"{data}: {count(len(rows))} rows; {named}: ") + example)
    reward = (TEMPLATES / f"{grading.function}.py").read_text(encoding="utf-8")
    return {
        "recipe.yaml": Template((TEMPLATES / "recipe.yaml").read_text(encoding="utf-8")).substitute(values),
        "reward.py": with_parameters(reward, others(columns, present)),
    }


def find_columns(data: str, first: Mapping[str, Any], question: str | None, answer: str | None) -> QuestionAndAnswer:
    """Find the columns of question and answer, by their names where they are not given.

    Args:
        first: the first row.

    Raises:
        UserError: the names don't tell; names the columns of the file.
    """
    names = {"_".join(name.lower().split()): name for name in first}
    asked = question or next((names[name] for name in QUESTIONS if name in names), None)
    right = answer or next((names[name] for name in ANSWERS if name in names and names[name] != asked), None)
    left = [name for name in first if name not in (asked, right)]
    if len(first) == 2 and len(left) == 1:  # one of two was found: the other one is the other one
        asked, right = asked or left[0], right or left[0]
    if asked is None or right is None:
        missing = [what for what, name in (("question", asked), ("answer", right)) if name is None]
        what = f"can't tell which column of {data} is the {' and which the '.join(missing)}"
        remedy = "name " + " and ".join(f"--{what} COLUMN" for what in missing)
        raise UserError(f"{what}; columns: {', '.join(first)}", remedy=remedy)
    if question is None and {"instruction", "input"} <= first.keys() and asked == "instruction":
        return QuestionAndAnswer("question", "{instruction}\n{input}", right)
    if right == "reward_model" and answer is None:  # verl's
        right = "reward_model.ground_truth"
    is_messages = is_chat(first.get(asked)) or _is_shared_chat(first.get(asked))
    return QuestionAndAnswer("messages" if is_messages else "question", asked, right)


def _is_shared_chat(value: Any) -> bool:
    """Return True for a list of {from, value}, ShareGPT's form of a chat."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and "from" in value[0]


def some_rows(rows: Rows) -> list[Row]:
    """Return at most `READ` rows, evenly spaced."""
    numbers = range(len(rows)) if len(rows) <= READ else [i * len(rows) // READ for i in range(READ)]
    return [rows[number] for number in numbers]


def require_answers(data: str, column: str, rows: Sequence[Row]) -> None:
    """Raise UserError if a row has no answer: its completions could not be graded."""
    missing = [row for row in rows if row.answer is None or row.answer == ""]
    if missing:
        question = excerpt_of(missing[0].messages[-1]["content"])
        what = f"{data}: {len(missing):,} of {len(rows):,} rows have no value in {column!r}, the first at {question}"
        raise UserError(what, remedy="remove these rows, or name another column with --answer COLUMN")


def grading_of(answers: Sequence[Any]) -> Grading:
    """Choose the reward for answers such as these: numbers, a few words, solutions that end in a number, or texts."""
    texts = [str(part) for answer in answers for part in (answer if isinstance(answer, list) else [answer])]
    most = max(map(len, texts), default=0)
    tokens = min(LONGEST, 8 * (2 + most // 16))
    why = f"the longest answer has {most:,} characters"
    if all(as_number(text) is not None for text in texts):
        return Grading("right_number", "Reply with only the number.", max(16, tokens), why)
    if all("####" in text and as_number(text.rpartition("####")[2]) is not None for text in texts):  # GSM8K's
        return Grading("right_number", None, max(128, tokens), why)
    words = sorted(len(text.split()) for text in texts)
    if words[len(words) // 2] < MANY_WORDS:
        return Grading("right_words", "Reply with only the answer.", max(16, tokens), why)
    return Grading("shared_words", None, max(64, tokens), why)


def held_out_settings(task: Files, count: int) -> tuple[str, int, str]:
    """Return the recipe's line that holds out a share of the rows, the number of those to train on, and the section
    that evaluates the others. If the questions are so few that one part would be empty, the line is a comment, and
    there is no such section."""
    share = next(share for least, share in SHARES.items() if count >= least)
    try:
        trained = len(replace(task, held_out=share).rows(0))
        evaluated = len(replace(task, held_out=share, part="held_out").rows(0))
    except FieldError:
        return f"# held_out: {share}           # too few questions: one part would be empty", count, ""
    line = f"held_out: {share:<12} # a hash of the question chooses these {evaluated:,}; they are only evaluated"
    return line, trained, EVALUATION


def prompt_line(columns: QuestionAndAnswer, present: Sequence[str]) -> str:
    """Return the recipe's line for the question, with a hint if the file has further columns."""
    line = f"{columns.field}: {written(columns.question)}"
    more = [name for name in others(columns, present) if name.lower() not in ("id", "index", "uid")]
    if columns.field == "question" and "{" not in columns.question and more:
        template = written("{" + more[0] + "}\n{" + columns.question + "}")
        line = f"{line:<22} # or a template over several columns: {template}"
    return line


def others(columns: QuestionAndAnswer, present: Sequence[str]) -> list[str]:
    """Return the columns that are neither the question nor the answer."""
    taken = {columns.question, columns.answer.partition(".")[0]}
    return [name for name in present if name not in taken and "{" + name + "}" not in columns.question]


def with_parameters(reward: str, more: Sequence[str]) -> str:
    """Return the text of reward.py with a comment that names the further columns that the function can take."""
    names = [printable(name) for name in more if name.isidentifier()]
    if not names:
        return reward
    note = f"# A parameter with the name of a column gets its value: {', '.join(names)}"
    return reward.replace("\n\n\ndef ", f"\n\n{note}\n\n\ndef ", 1)


def written(text: str) -> str:
    """Return the text as YAML, quoted only where it must be."""
    try:
        plain = yaml.safe_load(f"[{text}]") == [text] and printable(text) == text and "#" not in text
    except yaml.YAMLError:
        plain = False
    return text if plain else json.dumps(text, ensure_ascii=False)


def excerpt_of(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return repr(printable(text, 60))
