"""What holds for every task of the table."""

import dataclasses
import inspect
import json

import pytest

from proxima.task import TASKS, Row
from proxima.task.mix import WeightedTask

LINES = "".join(json.dumps({"question": f"{i}?", "answer": f"so\n#### {i}"}) + "\n" for i in range(6))


@pytest.fixture
def made(tmp_path):
    """A small instance of a kind."""

    def make(kind):
        if kind in ("jsonl", "gsm8k"):
            (tmp_path / "d.jsonl").write_text(LINES)
            return TASKS[kind](path=str(tmp_path / "d.jsonl"))
        if kind == "parquet":
            import pyarrow as pa
            from pyarrow import parquet

            parquet.write_table(
                pa.Table.from_pylist([json.loads(line) for line in LINES.splitlines()]), tmp_path / "d.parquet"
            )
            return TASKS[kind](path=str(tmp_path / "d.parquet"))
        if kind == "prepared":
            import pyarrow as pa
            from pyarrow import parquet

            rows = [json.loads(line) for line in LINES.splitlines()]
            chats = [{**row, "messages": [{"role": "user", "content": row["question"]}]} for row in rows]
            parquet.write_table(pa.Table.from_pylist(chats), tmp_path / "train.parquet")
            return TASKS[kind](path=str(tmp_path))
        if kind == "dataset":
            datasets = pytest.importorskip("datasets")
            datasets.Dataset.from_list([json.loads(line) for line in LINES.splitlines()]).save_to_disk(
                str(tmp_path / "saved")
            )
            return TASKS[kind](path=str(tmp_path / "saved"))
        if kind == "reasoning_gym":
            pytest.importorskip("reasoning_gym")
            return TASKS[kind](task="chain_sum", size=6)
        if kind == "mix":
            return TASKS[kind](
                size=6, tasks=[WeightedTask(name=f"{n}", task=TASKS["arithmetic"](size=n)) for n in (2, 9)]
            )
        return TASKS[kind](count=6, environment="guess") if kind == "seeds" else TASKS[kind](size=6)

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
