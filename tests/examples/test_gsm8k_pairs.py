"""`examples/gsm8k_pairs.py`: pairs of the same question, split by question, as for a reward model."""

import json
import subprocess
import sys
from pathlib import Path

from proxima.task.local_files import Jsonl

SCRIPT = Path(__file__).parents[2] / "examples" / "gsm8k_pairs.py"


def test_pairs_are_of_one_question_and_questions_are_split(tmp_path):
    def solved(number, *verdicts):
        return {f"model {i}": {"is_correct": v, "solution": f" {number} by {i} "} for i, v in enumerate(verdicts)}

    rows = [
        {"question": f"q {n}", "ground_truth": f"so it is {n}\nA: {n}", **solved(n, True, n % 3 > 0, False, False)}
        for n in range(60)
    ]
    rows.append({"question": "all right", "ground_truth": "A: 99", **solved(99, True, True, True, True)})
    (tmp_path / "solutions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(SCRIPT), str(tmp_path / "out"), str(tmp_path / "solutions.jsonl")]
    subprocess.run(command, check=True, capture_output=True)
    files = {name: tmp_path / "out" / f"{name}.jsonl" for name in ("train", "test")}
    pairs = {name: [json.loads(line) for line in file.read_text().splitlines()] for name, file in files.items()}
    asked = {name: {pair["question"] for pair in item} for name, item in pairs.items()}
    assert not asked["train"] & asked["test"] and len(asked["train"] | asked["test"]) == 60 and len(asked["test"]) > 4
    for pair in pairs["train"] + pairs["test"]:
        number = pair["question"].removeprefix("q ")
        assert pair["chosen"].startswith(f"{number} by ") and pair["chosen"][-1] in "01"
        assert pair["rejected"].startswith(f"{number} by ") and pair["rejected"] != pair["chosen"]
    assert max(sum(p["question"] == q for p in pairs["train"]) for q in asked["train"]) == 4
    questions = Jsonl(path=str(tmp_path / "out" / "questions.jsonl")).rows(0)
    held_out = {questions[i].messages[0]["content"]: questions[i].answer for i in range(len(questions))}
    assert asked["test"] <= held_out.keys() and not asked["train"] & held_out.keys()
    assert all(answer == question.removeprefix("q ") for question, answer in held_out.items() if question[0] == "q")


def test_a_file_that_is_missing_is_one_line(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path / "out"), str(tmp_path / "none.jsonl")]
    process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (1, "")
    assert (
        process.stderr
        == f"error: {tmp_path}/none.jsonl: No such file or directory; name a copy as the second argument\n"
    )
