"""What `proxima init --data` writes: a recipe and a reward for the columns of a user's file."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, Literal

import yaml

from proxima.data import FieldError, FieldErrors, UserError
from proxima.data.errors import counted, suggestion
from proxima.data.json_reader import load_json
from proxima.reward.math.marked import as_number
from proxima.task.column_mapping import is_chat
from proxima.task.file_formats import data_suffix, headless, looks_like_data
from proxima.task.held_out_part import BY, question_keys, rows_of_part, usual_share
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
LEADING_ZERO = re.compile(r"\s*0\d")
EVALUATION = """\
eval:                       # before and after training, and every 10 steps, on the held-out part
  every: 10

"""
FLAGS = {"path": "--data", "question": "--question", "messages": "--question", "answer": "--answer"}  # of the fields
FIELD_IN_REMEDY = re.compile(r"\b(question|answer)=(?=\S)")
SFT_RECIPE = "cpu/sft"
PAIRS_RECIPE = "cpu/dpo"


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
class Parts:
    """The rows of a file that are trained on and those that are held out.

    Args:
        line: of the recipe: the share, or a comment if the questions are so few that one part would be empty.
        trained, held_out: the number of rows of each part.
    """

    line: str
    trained: int
    held_out: int


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
    """Return the contents of recipe.yaml and reward.py for a user's data; print which columns they read, and how many
    rows are held out.

    Args:
        data: a file, or a pattern.
        folder: where the files will be written; the recipe is trained there.
        model: `model.path` of the recipe.
        question, answer: the columns; None: told by their names.

    Raises:
        UserError: the file can't be read, has no such columns, or has rows without an answer; or the names of its
            columns don't tell which is the question and which the answer. It names the flags, not fields of a task.
    """
    with as_flags():
        kind, task_class = task_kind_of(data)
        source = task_class(path=data, answer=None)
        present = source.columns()
        first = source.first()
        if not present or first is None:
            raise UserError(f"{data} has no rows", remedy="name another file with --data")
        columns = find_columns(data, first, question, answer)
        chosen: dict[str, Any] = {columns.field: columns.question, "answer": columns.answer}
        rows = task_class(path=data, **chosen).rows(0)
        read = usable_rows(data, rows, columns)
    grading = grading_of([row.answer for row in read])
    parts = held_out_share(rows)
    path = data
    if not os.path.isabs(data) and not data.startswith("~"):
        path = os.path.relpath(data, folder)
    values = {
        "data": printable(data),
        "model": written(model),
        "kind": kind,
        "path": written(path),
        "prompt": prompt_line(columns, present),
        "answer": written(columns.answer),
        "held_out": parts.line,
        "system": grading.system or "null",
        "function": grading.function,
        "max_tokens": f"{grading.max_tokens:<17} # {grading.why}",
        "prompts": str(min(8, parts.trained)),
        "evaluation": EVALUATION if parts.held_out else "",
    }
    for line in what_is_read(data, rows, read[0], columns, parts):
        print(line)
    if question is None or answer is None:
        for line in other_choices(first, columns, question, answer):
            print(line)
    reward = (TEMPLATES / f"{grading.function}.py").read_text(encoding="utf-8")
    return {
        "recipe.yaml": Template((TEMPLATES / "recipe.yaml").read_text(encoding="utf-8")).substitute(values),
        "reward.py": with_parameters(reward, others(columns, present)),
    }


def task_kind_of(data: str) -> tuple[str, type[Files]]:
    """Return the kind of task that reads a file, or the first file of a pattern, and its class."""
    return KINDS.get(data_suffix(find_files(data)[0]), ("files", Files))


@contextmanager
def as_flags() -> Iterator[None]:
    """Name the flags of the command in the errors raised inside, in the place of fields of a task, which the user did
    not write."""
    try:
        yield
    except FieldErrors as several:
        raise UserError("\n".join(_with_flag(error) for error in several.errors)) from None
    except FieldError as error:
        raise UserError(_with_flag(error)) from None
    except UserError as error:
        raise UserError(error.reason, remedy=FIELD_IN_REMEDY.sub(r"--\1 ", error.remedy)) from None


def _with_flag(error: FieldError) -> str:
    named = FieldError(FLAGS.get(error.field, error.field), error.value, error.bound)
    remedy = FIELD_IN_REMEDY.sub(r"--\1 ", error.remedy.replace(", or null for no answers", ""))
    return str(UserError(named.reason, remedy=remedy))


def what_is_read(data: str, rows: Rows, first: Row, columns: QuestionAndAnswer, parts: Parts) -> Iterator[str]:
    """Yield what the terminal says of the data: the columns, with an example, and the rows that are held out."""
    different = len(set(question_keys(rows)))
    what = counted(len(rows), "row")
    if different < len(rows):
        what += f", {counted(different, 'different question')}"
    named = f"the question is {columns.question!r}, the answer {columns.answer!r}"
    example = printable(f"{excerpt_of(first.messages[-1]['content'])} → {excerpt_of(first.answer)}")
    yield printable(f"{data}: {what}; {named}: ") + example

    if parts.held_out:
        verb = "is" if parts.held_out == 1 else "are"
        yield f"{count(parts.held_out)} of {counted(len(rows), 'row')} {verb} held out ({BY}) and only evaluated"
    else:
        yield "too few questions to hold some out: all rows are trained on, and nothing is evaluated"


def other_choices(
    first: Mapping[str, Any], columns: QuestionAndAnswer, question: str | None, answer: str | None
) -> Iterator[str]:
    """Yield a line for question and answer, unless the user has named it, if the names of further columns fit."""
    taken = {columns.question, columns.answer.partition(".")[0]}
    for what, given, chosen, names in (
        ("question", question, columns.question, QUESTIONS),
        ("answer", answer, columns.answer, ANSWERS),
    ):
        fitting = [name for name in first if column_key(name) in names and name not in taken]
        fitting = [name for name in fitting if "{" + name + "}" not in columns.question]
        if given is None and fitting:
            others = " or ".join(repr(name) for name in fitting)
            yield printable(f"the {what} is {chosen!r}; if it is {others}, add --{what} {shlex.quote(fitting[0])}")


def column_key(name: str) -> str:
    """A column's name in the form of `QUESTIONS` and `ANSWERS`."""
    return "_".join(name.lower().split())


def find_columns(data: str, first: Mapping[str, Any], question: str | None, answer: str | None) -> QuestionAndAnswer:
    """Find the columns of question and answer, by their names where they are not given.

    Args:
        first: the first row.

    Raises:
        UserError: the names don't tell, or the file is for SFT or DPO; names the columns of the file.
    """
    require_present(data, first, {"question": question, "answer": answer})
    names = {column_key(name): name for name in first}
    asked = question
    if not asked:
        asked = next((names[name] for name in QUESTIONS if name in names), None)
    right = answer
    if not right:
        right = next((names[name] for name in ANSWERS if name in names and names[name] != asked), None)
    if answer is None:
        refuse_other_training(data, first, asked, right)
    left = [name for name in first if name not in (asked, right)]
    if len(first) == 2 and len(left) == 1:  # one of two was found: the other one is the other one
        asked = asked or left[0]
        right = right or left[0]
    if asked is None or right is None:
        require_header(data, first)
        missing = [what for what, name in (("question", asked), ("answer", right)) if name is None]
        what = f"can't tell which column of {data} is the {' and which the '.join(missing)}"
        remedy = "name " + " and ".join(f"--{what} COLUMN" for what in missing)
        raise UserError(f"{what}; columns: {', '.join(first)}", remedy=remedy)
    if question is None and {"instruction", "input"} <= first.keys() and asked == "instruction":
        return QuestionAndAnswer("question", "{instruction}\n{input}", right)
    if right == "reward_model" and answer is None:  # verl's
        right = "reward_model.ground_truth"
    if is_chat(first.get(asked)) or _is_shared_chat(first.get(asked)):
        return QuestionAndAnswer("messages", asked, right)
    return QuestionAndAnswer("question", asked, right)


def require_present(data: str, first: Mapping[str, Any], given: Mapping[str, str | None]) -> None:
    """Raise UserError if a column that the user names is none of the file's; a template is checked by the task."""
    for what, name in given.items():
        if name is None or "{" in name or name in first or name.partition(".")[0] in first:
            continue
        remedy = suggestion(name, first)
        if not remedy.startswith("known: "):  # which lists the columns
            remedy += f" columns: {', '.join(first)}"
        raise UserError(f"--{what}={name!r} names no column of {data}", remedy=remedy)


def require_header(data: str, first: Mapping[str, Any]) -> None:
    """Raise UserError if the first line of a CSV file seems to be data."""
    _, task_class = task_kind_of(data)
    if task_class is Csv and looks_like_data(first):
        raise headless(find_files(data)[0], first)


def refuse_other_training(data: str, first: Mapping[str, Any], asked: str | None, right: str | None) -> None:
    """Raise UserError, with the command that trains on it, for a file of another kind of training: completions with
    labels, or, without an answer, preference pairs or chats that end with one."""
    names = {column_key(name): name for name in first}
    prompt = asked or ""
    if asked in (names.get("chosen"), names.get("rejected")):
        prompt = ""
    chat = bool(prompt) and (is_chat(first[prompt]) or _is_shared_chat(first[prompt]))
    mapped = {"messages": prompt} if chat else {"question": prompt}
    if prompt and {"completion", "label"} <= names.keys() and isinstance(first[names["label"]], bool):
        more = ["preference.loss=kto", *renamed_columns(names, "completion", "label")]
        raise _trained_by(data, "completions with labels, for KTO", PAIRS_RECIPE, mapped, more)
    if right is not None:
        return
    if {"chosen", "rejected"} <= names.keys():
        if not prompt:
            mapped = {"messages": names["chosen"]}
        what = "preference pairs, for DPO or a reward model, and has no column with an answer"
        raise _trained_by(data, what, PAIRS_RECIPE, mapped, renamed_columns(names, "chosen", "rejected"))
    if prompt and chat and _ends_with_answer(first[prompt]):
        what = "chats that end with an answer, for SFT, and has no column with an answer"
        raise _trained_by(data, what, SFT_RECIPE, mapped, [])


def renamed_columns(names: Mapping[str, str], *fields: str) -> list[str]:
    """Return the overrides for the columns that don't have the default names; `names` as in `find_columns`."""
    return [f"preference.{field}={names[field]}" for field in fields if names[field] != field]


def _trained_by(data: str, what: str, recipe: str, mapped: Mapping[str, str], more: Sequence[str]) -> UserError:
    """The error for a file of another kind of training: it names the recipe, and how to map the columns."""
    kind, _ = task_kind_of(data)
    fields = {"kind": kind, "path": data, **mapped, "answer": None}
    task = yaml.safe_dump(fields, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True).strip()
    words = ["proxima", "train", recipe, "data.system=null", "eval.task=null", *more, f"task={task}"]
    remedy = f"train on it with {shlex.join(words)}, or name the column with --answer COLUMN"
    return UserError(f"{data} holds {what}", remedy=remedy)


def _ends_with_answer(value: Any) -> bool:
    """Return True for a chat whose last message is the assistant's."""
    chat = load_json(value) if isinstance(value, str) else value
    last = chat[-1] if chat else None
    return isinstance(last, Mapping) and (last.get("role") or last.get("from")) in ("assistant", "gpt", "model")


def _is_shared_chat(value: Any) -> bool:
    """Return True for a list of {from, value}, ShareGPT's form of a chat."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and "from" in value[0]


def usable_rows(data: str, rows: Rows, columns: QuestionAndAnswer) -> list[Row]:
    """Return the rows that are looked at; UserError if a row has no question, or one of these no answer."""
    for error in unusable_rows(rows):
        what = f"{data}: a row has no question in {columns.question!r}"
        raise UserError(what, remedy=f"{error.remedy}, with --question COLUMN")
    read = some_rows(rows)
    require_answers(data, columns.answer, read)
    return read


def some_rows(rows: Rows) -> list[Row]:
    """Return at most `READ` rows, evenly spaced."""
    if len(rows) <= READ:
        return [rows[number] for number in range(len(rows))]
    return [rows[i * len(rows) // READ] for i in range(READ)]


def require_answers(data: str, column: str, rows: Sequence[Row]) -> None:
    """Raise UserError if a row has no answer: its completions could not be graded."""
    missing = [row for row in rows if row.answer is None or row.answer == ""]
    if missing:
        question = excerpt_of(missing[0].messages[-1]["content"])
        verb = "has" if len(missing) == 1 else "have"
        share = f"{len(missing):,} of {counted(len(rows), 'row')}"
        what = f"{data}: {share} {verb} no value in {column!r}, the first at {question}"
        raise UserError(what, remedy="remove these rows, or name another column with --answer COLUMN")


def grading_of(answers: Sequence[Any]) -> Grading:
    """Choose the reward for answers such as these: numbers, a few words, solutions that end in a number, or texts."""
    texts: list[str] = []
    for answer in answers:
        accepted = answer if isinstance(answer, list) else [answer]
        texts += map(str, accepted)
    most = max(map(len, texts), default=0)
    tokens = min(LONGEST, 8 * (2 + most // 16))
    why = f"the longest answer has {most:,} characters"
    is_code = any(LEADING_ZERO.match(text) for text in texts)  # a postal code: 01234 is not 1234
    if not is_code and all(as_number(text) is not None for text in texts):
        return Grading("right_number", "Reply with only the number.", max(16, tokens), why)
    if all("####" in text and as_number(text.rpartition("####")[2]) is not None for text in texts):  # GSM8K's
        return Grading("right_number", None, max(128, tokens), why)
    words = sorted(len(text.split()) for text in texts)
    if words[len(words) // 2] < MANY_WORDS:
        return Grading("right_words", "Reply with only the answer.", max(16, tokens), why)
    return Grading("shared_words", None, max(64, tokens), why)


def held_out_share(rows: Rows) -> Parts:
    """Return the parts of the rows, with a share that is held out unless one part would be empty."""
    share = usual_share(len(rows))
    try:
        trained = len(rows_of_part(rows, share, "train"))
        evaluated = len(rows_of_part(rows, share, "held_out"))
    except FieldError:
        return Parts(f"# held_out: {share}           # too few questions: one part would be empty", len(rows), 0)
    line = f"held_out: {share:<12} # a hash of the question chooses these {evaluated:,}; they are only evaluated"
    return Parts(line, trained, evaluated)


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
    if plain:
        return text
    return json.dumps(text, ensure_ascii=False)


def excerpt_of(value: Any) -> str:
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, default=str)
    return repr(printable(value, 60))
