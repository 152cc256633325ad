"""`examples/rollout_pairs.py`: pairs of one question and step, split by question."""

import json
import runpy
from pathlib import Path

import pytest

import proxima
from proxima.task import Jsonl

SCRIPT = Path(__file__).parents[2] / "examples" / "rollout_pairs.py"


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    """The files that come of the rollouts of two steps: of each question a right, two wrong, and an empty answer."""
    pandas = pytest.importorskip("pandas")
    answers = [(f"right {i}", True) for i in range(3)] + [("wrong", False), ("wrong", False), ("worse", False)]
    rows = [
        {"step": step, "prompt_uid": n, "question": f"q {n}", "text": f"{text} of {n} at {step}", "correct": correct}
        for step in (1, 2)
        for n in range(40)
        for text, correct in answers
    ]
    rows += [{"step": 1, "prompt_uid": n, "question": f"q {n}", "text": " ", "correct": False} for n in range(40)]
    rows += [{"step": 3, "prompt_uid": 99, "question": "all right", "text": "so", "correct": True}]
    rows += [{"step": 3, "prompt_uid": 98, "question": "unknown", "text": text, "correct": None} for text in "ab"]

    class Run:
        def rollouts(self, columns):
            return pandas.DataFrame(rows)[columns]

    monkeypatch.setattr(proxima, "load_run", lambda folder: Run(), raising=False)
    runpy.run_path(str(SCRIPT))["main"]("a run", tmp_path)
    return {name: tmp_path / f"{name}.jsonl" for name in ("train", "test")}


def test_pairs_are_of_one_question_and_step(pairs):
    found = {name: [json.loads(line) for line in file.read_text().splitlines()] for name, file in pairs.items()}
    asked = {name: {pair["question"] for pair in rows} for name, rows in found.items()}
    assert not asked["train"] & asked["test"] and len(asked["train"] | asked["test"]) == 40 and len(asked["test"]) > 3
    for pair in found["train"] + found["test"]:
        right, wrong = pair["chosen"].split(), pair["rejected"].split()
        assert right[0] == "right" and wrong[0] in ("wrong", "worse")
        assert right[-3:] == wrong[-3:] and f"q {right[-3]}" == pair["question"]
    distinct = {tuple(pair.values()) for pair in found["train"]}
    assert len(distinct) == len(found["train"]) == 8 * len(asked["train"])


def test_proxima_reward_reads_them(pairs):
    row = Jsonl(path=str(pairs["train"]), answer=None).rows(0)[0]
    assert row.messages[0]["content"].startswith("q ") and {"chosen", "rejected"} <= row.metadata.keys()
