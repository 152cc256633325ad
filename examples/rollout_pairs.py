"""Write pairs for reward models and DPO from the rollouts of runs: a right and a wrong answer of a policy to the same
question, from any steps.

    python examples/rollout_pairs.py runs/quickstart data/own_pairs
    python examples/rollout_pairs.py runs/one runs/other data/own_pairs

Such pairs show a reward model what policies really write. Right answers mostly come from late steps and wrong ones from
early steps, so the unfinished and irrelevant answers of the untrained policy are among them. Pairs within a single step
would hardly contain these, and a policy trained with the reward model would find what was never labelled wrong. A
question has at most `PER_QUESTION` pairs, the most frequent answers first. The split is by question, not by pair: a
fifth of the questions goes to test.jsonl.
"""

import json
import sys
from collections import Counter
from itertools import cycle, islice
from pathlib import Path

import proxima
from proxima.data.random import share_of

HELD_OUT, PER_QUESTION = 0.2, 4


def main(*folders):
    *runs, folder = folders
    answers = {}
    for run in runs:
        rows = proxima.load_run(run).rollouts(columns=["question", "text", "correct"])
        for question, text, correct in rows[rows["text"].str.strip() != ""].itertuples(index=False):
            if correct in (True, False):
                answers.setdefault(question, {True: Counter(), False: Counter()})[bool(correct)][text] += 1
    split = {"train": [], "test": []}
    for question, texts in answers.items():
        right, wrong = ([text for text, _ in texts[verdict].most_common()] for verdict in (True, False))
        if right and wrong:
            pairs = islice(zip(cycle(right), cycle(wrong), strict=False), PER_QUESTION)
            part = "test" if share_of(question) < HELD_OUT else "train"
            split[part] += [
                {"question": question, "chosen": chosen, "rejected": rejected}
                for chosen, rejected in dict.fromkeys(pairs)
            ]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, pairs in split.items():
        text = "".join(json.dumps(pair) + "\n" for pair in pairs)
        Path(folder, f"{name}.jsonl").write_text(text, encoding="utf-8")
        count = len({pair["question"] for pair in pairs})
        print(f"{folder}/{name}.jsonl: {len(pairs):,} pairs of {count:,} questions")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
