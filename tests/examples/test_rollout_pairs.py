"""`examples/rollout_pairs.py`: pairs of one question, of the frequent answers first, split by question."""

import json
import runpy
from pathlib import Path

import pytest

import proxima

SCRIPT = Path(__file__).parents[2] / "examples" / "rollout_pairs.py"


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    """The files that come of two runs: early all are wrong, mostly in one way, and later most are right."""
    pandas = pytest.importorskip("pandas")
    early = [("rare", False), *[("often", False)] * 5, ("other", False), (" ", False), ("unknown", None)]
    late = [("right", True), ("right", True), ("fine", True), ("wrong", False)]
    runs = {
        f"run {run}": [
            {"question": f"q {n}", "text": f"{text} {n}" if text.strip() else text, "correct": correct}
            for n in range(60)
            for text, correct in (early if n % 2 == run else late)
        ]
        + [{"question": "all right", "text": "so", "correct": True}]
        for run in (0, 1)
    }

    class Run:
        def __init__(self, folder):
            self.rows = runs[folder]

        def rollouts(self, columns):
            return pandas.DataFrame(self.rows)[columns]

    monkeypatch.setattr(proxima, "load_run", Run, raising=False)
    runpy.run_path(str(SCRIPT))["main"]("run 0", "run 1", tmp_path)
    return {name: tmp_path / f"{name}.jsonl" for name in ("train", "test")}


def test_pairs_are_of_one_question_in_whichever_run(pairs):
    output = {name: [json.loads(line) for line in file.read_text().splitlines()] for name, file in pairs.items()}
    asked = {name: {pair["question"] for pair in rows} for name, rows in output.items()}
    assert not asked["train"] & asked["test"] and len(asked["train"] | asked["test"]) == 60 and len(asked["test"]) > 4
    for name, rows in output.items():
        for question in asked[name]:
            number = question.removeprefix("q ")
            of = [(p["chosen"], p["rejected"]) for p in rows if p["question"] == question]
            assert of[0] == (f"right {number}", f"often {number}") and len(of) == len(set(of)) == 4
            assert {right for right, _ in of} == {f"right {number}", f"fine {number}"}
            assert {wrong for _, wrong in of} == {f"{word} {number}" for word in ("often", "rare", "other", "wrong")}
