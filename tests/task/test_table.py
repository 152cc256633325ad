"""What holds for every task of the table."""

import json
from pathlib import Path

import pytest

from proxima.task import TASKS
from proxima.task.mix import WeightedTask
from proxima.task.protocol import Row
from tests.documented import assert_documented
from tests.harbor_tasks import write_tasks
from tests.prepare.published import write_jsonl, write_parquet

ROWS = [{"question": f"{i}?", "answer": f"so\n#### {i}"} for i in range(6)]
FIELDS = {  # of the kinds that read no file
    "reasoning_gym": {"task": "chain_sum", "size": 6},
    "mix": {"size": 6, "tasks": [WeightedTask(name=f"{n}", task=TASKS["arithmetic"](size=n)) for n in (2, 9)]},
    "seeds": {"count": 6, "environment": "guess"},
    "arithmetic": {"size": 6},
    "shapes": {"size": 6},
    "environment": {"environment": {"kind": "verifiers", "name": "six_words"}},
}
STAND_IN = (
    Path(__file__).parents[2] / "packages" / "proxima-worlds" / "tests" / "stand_in"
)  # for the library of that environment


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A small instance of a kind."""
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))

    def make(kind):
        if kind in FIELDS:
            pytest.importorskip("reasoning_gym") if kind == "reasoning_gym" else None
            return TASKS[kind](**FIELDS[kind])
        path = tmp_path
        if kind == "harbor":
            for number in range(3):
                write_tasks(tmp_path, f"{number}")
        elif kind in ("jsonl", "gsm8k"):
            path = write_jsonl(tmp_path / "d.jsonl", ROWS)
        elif kind == "dataset":
            data = pytest.importorskip("datasets").Dataset.from_list(ROWS)
            data.save_to_disk(str(path := tmp_path / "saved"))
        else:
            chats = [{**row, "messages": [{"role": "user", "content": row["question"]}]} for row in ROWS]
            path = write_parquet(tmp_path / "train.parquet", chats if kind == "prepared" else ROWS)
        return TASKS[kind](path=str(tmp_path if kind in ("prepared", "harbor") else path))

    return make


@pytest.mark.parametrize("kind", sorted(TASKS))
def test_is_a_documented_spec(kind):
    assert_documented(TASKS[kind])


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
    for index in (6, -1):
        with pytest.raises(IndexError):
            rows[index]


@pytest.mark.parametrize("kind", ["arithmetic", "gsm8k", "prepared", "reasoning_gym"])
def test_a_side_is_train_or_test(kind):
    pytest.importorskip("reasoning_gym") if kind == "reasoning_gym" else None
    fields = {"prepared": {"path": "x"}, "reasoning_gym": {"task": "countdown"}}.get(kind, {})
    with pytest.raises(ValueError, match="split='dev' must be 'train' or 'test'"):
        TASKS[kind](**fields, split="dev")
