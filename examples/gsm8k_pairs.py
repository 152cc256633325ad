"""Pairs for reward models and DPO from GSM8K's published model solutions: a correct against a wrong one of the same
question.

    python examples/gsm8k_pairs.py example_model_solutions.jsonl data/gsm8k_pairs

The file is from https://github.com/openai/grade-school-math (MIT licence): 1,319 questions with solutions of four
models. Questions, not pairs, are split: a fifth of them is test.jsonl. A question has at most `PER_QUESTION` pairs.
questions.jsonl has the questions of that fifth and their answers. All are from GSM8K's test set, so what was trained on
train.jsonl can be asked these, and no other questions of that set.
"""

import json
import sys
from itertools import islice, product
from pathlib import Path

from proxima.data.random import share_of

HELD_OUT, PER_QUESTION = 0.2, 4


def pairs_of(row):
    """The pairs of a question, each correct solution with each wrong one."""
    solutions = [found for name, found in sorted(row.items()) if isinstance(found, dict)]
    texts = {
        verdict: [s["solution"].strip() for s in solutions if s["is_correct"] is verdict] for verdict in (True, False)
    }
    for chosen, rejected in islice(product(dict.fromkeys(texts[True]), dict.fromkeys(texts[False])), PER_QUESTION):
        yield {"question": row["question"], "chosen": chosen, "rejected": rejected}


def main(source, folder):
    split = {"train": [], "test": [], "questions": []}
    for line in Path(source).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        held_out = share_of(row["question"]) < HELD_OUT
        split["test" if held_out else "train"] += pairs_of(row)
        if held_out:
            answer = row["ground_truth"].rpartition("A: ")[2].strip()
            split["questions"].append({"question": row["question"], "answer": answer})
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, rows in split.items():
        Path(folder, f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        count = len({row["question"] for row in rows})
        pairs = "" if name == "questions" else f"{len(rows):,} pairs of "
        print(f"{folder}/{name}.jsonl: {pairs}{count:,} questions")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
