"""What holds for every task of the table."""

import dataclasses
import inspect
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from proxima.task import TASKS, Row
from proxima.task.mix import WeightedTask

LINES = "".join(json.dumps({"question": f"{i}?", "answer": f"so\n#### {i}"}) + "\n" for i in range(6))


ROWS = [json.loads(line) for line in LINES.splitlines()]
FIELDS = {  # of the kinds that read no file
    "reasoning_gym": {"task": "chain_sum", "size": 6},
    "mix": {"size": 6, "tasks": [WeightedTask(name=f"{n}", task=TASKS["arithmetic"](size=n)) for n in (2, 9)]},
    "seeds": {"count": 6, "environment": "guess"},
    "arithmetic": {"size": 6},
}


@pytest.fixture
def made(tmp_path):
    """A small instance of a kind."""

    def make(kind):
        if kind in FIELDS:
            pytest.importorskip("reasoning_gym") if kind == "reasoning_gym" else None
            return TASKS[kind](**FIELDS[kind])
        path = tmp_path
        if kind in ("jsonl", "gsm8k"):
            (path := tmp_path / "d.jsonl").write_text(LINES)
        elif kind == "dataset":
            data = pytest.importorskip("datasets").Dataset.from_list(ROWS)
            data.save_to_disk(str(path := tmp_path / "saved"))
        else:
            chats = [{**row, "messages": [{"role": "user", "content": row["question"]}]} for row in ROWS]
            path = tmp_path / "train.parquet"
            parquet.write_table(pa.Table.from_pylist(chats if kind == "prepared" else ROWS), path)
        return TASKS[kind](path=str(tmp_path if kind == "prepared" else path))

    return make


@pytest.mark.parametrize("kind", sorted(TASKS))
def test_is_a_documented_spec(kind):
    cls = TASKS[kind]
    assert dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen
    doc = inspect.cleandoc(cls.__dict__["__doc__"])
    first, blank, *_ = [*doc.splitlines(), ""]
    assert first.endswith(".") and (blank == "" or blank.startswith("Args:")), first
    docs = [
        inspect.cleandoc(base.__dict__.get("__doc__") or "") for base in cls.__mro__
    ]  # a base documents its own fields
    arguments = "\n".join(text.partition("Args:\n")[2].partition("\nReturns:")[0] for text in docs)
    for field in dataclasses.fields(cls):
        assert f"\n    {field.name}: " in f"\n{arguments}", f"{kind}.{field.name} is not documented"


@pytest.mark.parametrize("kind", sorted(TASKS))
def test_rows_are_random_access_deterministic_and_plain(kind, made):
    task = made(kind)
    rows, again = task.rows(3), made(kind).rows(3)
    assert len(rows) == len(again) == 6
    backwards = [rows[i] for i in reversed(range(6))]
    assert backwards == [again[i] for i in range(6)][::-1]
    for row in backwards:
        assert isinstance(row, Row) and row.messages[-1]["role"] == "user"
        assert bool(row.messages[-1]["content"]) == (kind != "seeds")  # whose prompts the environment writes
        assert json.loads(json.dumps([row.answer, dict(row.metadata)])) == [row.answer, dict(row.metadata)]
    with pytest.raises(IndexError):
        rows[6]


@pytest.mark.parametrize("kind", ["arithmetic", "gsm8k", "prepared", "reasoning_gym"])
def test_a_side_is_train_or_test(kind):
    pytest.importorskip("reasoning_gym") if kind == "reasoning_gym" else None
    fields = {"prepared": {"path": "x"}, "reasoning_gym": {"task": "countdown"}}.get(kind, {})
    with pytest.raises(ValueError, match="split='dev' must be 'train' or 'test'"):
        TASKS[kind](**fields, split="dev")
