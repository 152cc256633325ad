"""`examples/gsm8k_pairs.py` and `examples/rollout_pairs.py`: pairs of the same question, split by question."""

import json
import runpy
from pathlib import Path

import pytest

import proxima
from proxima.task.local_files import Jsonl

EXAMPLES = Path(__file__).parents[2] / "examples"
COUNT = 60


def main_of(name):
    return runpy.run_path(str(EXAMPLES / name))["main"]


def written(folder):
    """The pairs of both sides and their questions, of which none is on both."""
    files = {name: (folder / f"{name}.jsonl").read_text() for name in ("train", "test")}
    pairs = {name: [json.loads(line) for line in text.splitlines()] for name, text in files.items()}
    train, test = ({pair["question"] for pair in pairs[name]} for name in ("train", "test"))
    assert not train & test and len(train | test) == COUNT and len(test) > 4
    return pairs["train"] + pairs["test"], train, test


def test_pairs_of_published_solutions(tmp_path):
    def solved(number, *verdicts):
        return {f"model {i}": {"is_correct": v, "solution": f" {number} by {i} "} for i, v in enumerate(verdicts)}

    rows = [
        {"question": f"q {n}", "ground_truth": f"so it is {n}\nA: {n}", **solved(n, True, n % 3 > 0, False, False)}
        for n in range(COUNT)
    ]
    rows.append({"question": "all right", "ground_truth": "A: 99", **solved(99, True, True, True, True)})
    (tmp_path / "solutions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main_of("gsm8k_pairs.py")(str(tmp_path / "out"), str(tmp_path / "solutions.jsonl"))
    pairs, train, test = written(tmp_path / "out")
    for pair in pairs:
        number = pair["question"].removeprefix("q ")
        assert pair["chosen"].startswith(f"{number} by ") and pair["chosen"][-1] in "01"
        assert pair["rejected"].startswith(f"{number} by ") and pair["rejected"] != pair["chosen"]
    assert max(sum(p["question"] == q for p in pairs) for q in train) == 4
    questions = Jsonl(path=str(tmp_path / "out" / "questions.jsonl")).rows(0)
    held_out = {questions[i].messages[0]["content"]: questions[i].answer for i in range(len(questions))}
    assert test <= held_out.keys() and not train & held_out.keys()
    assert all(answer == question.removeprefix("q ") for question, answer in held_out.items() if question[0] == "q")


def test_a_file_that_is_missing_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["gsm8k_pairs.py", str(tmp_path / "out"), str(tmp_path / "none.jsonl")])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / "gsm8k_pairs.py"), run_name="__main__")
    line = f"error: {tmp_path}/none.jsonl: No such file or directory; name a copy as the second argument"
    assert stopped.value.code == line  # which Python prints, and ends with exit code 1


def test_pairs_of_rollouts_are_of_any_run_with_frequent_answers_first(tmp_path, monkeypatch):
    """Two runs: early all are wrong, mostly in one way, and later most are right."""
    pandas = pytest.importorskip("pandas")
    early = [("rare", False), *[("often", False)] * 5, ("other", False), (" ", False), ("unknown", None)]
    late = [("right", True), ("right", True), ("fine", True), ("wrong", False)]
    runs = {
        f"run {run}": [
            {"question": f"q {n}", "text": f"{text} {n}" if text.strip() else text, "correct": correct}
            for n in range(COUNT)
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
    main_of("rollout_pairs.py")("run 0", "run 1", tmp_path)
    pairs, train, test = written(tmp_path)
    for question in train | test:
        number = question.removeprefix("q ")
        of = [(p["chosen"], p["rejected"]) for p in pairs if p["question"] == question]
        assert of[0] == (f"right {number}", f"often {number}") and len(of) == len(set(of)) == 4
        assert {right for right, _ in of} == {f"right {number}", f"fine {number}"}
        assert {wrong for _, wrong in of} == {f"{word} {number}" for word in ("often", "rare", "other", "wrong")}
