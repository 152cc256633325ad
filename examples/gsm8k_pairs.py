"""Write pairs for reward models and DPO from GSM8K's published model solutions: a correct and a wrong one of the same
question.

    python examples/gsm8k_pairs.py runs/classic/pairs                                  # downloads the solutions, 2.6 MB
    python examples/gsm8k_pairs.py runs/classic/pairs example_model_solutions.jsonl    # a file that is already here

The file is from https://github.com/openai/grade-school-math (MIT licence): 1,319 questions with solutions of four
models. The split is by question, not by pair: a fifth of the questions goes to test.jsonl. A question has at most
`PER_QUESTION` pairs. questions.jsonl has the questions of that fifth and their answers. All are from GSM8K's test set,
so a model trained on train.jsonl may be evaluated on these questions, but on no others of that set.
"""

import json
import sys
import urllib.request
from itertools import islice, product
from pathlib import Path

from proxima.data.random import share_of

HELD_OUT, PER_QUESTION = 0.2, 4
SOLUTIONS = (
    "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
    "example_model_solutions.jsonl"
)


def solutions_in(folder):
    """Return the file of published solutions, downloaded into the folder if it is missing."""
    file = folder / SOLUTIONS.rpartition("/")[2]
    if not file.exists():
        print(f"downloading {SOLUTIONS}", flush=True)
        with urllib.request.urlopen(SOLUTIONS, timeout=60) as answer:
            file.write_bytes(answer.read())
    return file


def pairs_of(row):
    """Yield the pairs of a question, each correct solution with each wrong one, up to `PER_QUESTION`."""
    solutions = [value for name, value in sorted(row.items()) if isinstance(value, dict)]
    texts = {
        verdict: [s["solution"].strip() for s in solutions if s["is_correct"] is verdict] for verdict in (True, False)
    }
    for chosen, rejected in islice(product(dict.fromkeys(texts[True]), dict.fromkeys(texts[False])), PER_QUESTION):
        yield {"question": row["question"], "chosen": chosen, "rejected": rejected}


def main(folder, source=None):
    Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        text = (Path(source) if source else solutions_in(Path(folder))).read_text(encoding="utf-8")
    except OSError as error:  # no such file, or no network
        place = source or SOLUTIONS
        sys.exit(
            f"error: {place}: {getattr(error, 'reason', None) or error.strerror}; name a copy as the second argument"
        )
    split = {"train": [], "test": [], "questions": []}
    for line in text.splitlines():
        row = json.loads(line)
        held_out = share_of(row["question"]) < HELD_OUT
        split["test" if held_out else "train"] += pairs_of(row)
        if held_out:
            answer = row["ground_truth"].rpartition("A: ")[2].strip()
            split["questions"].append({"question": row["question"], "answer": answer})
    for name, rows in split.items():
        Path(folder, f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        count = len({row["question"] for row in rows})
        if name == "questions":
            pairs = ""
        else:
            pairs = f"{len(rows):,} pairs of "
        print(f"{folder}/{name}.jsonl: {pairs}{count:,} questions")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(*sys.argv[1:])
