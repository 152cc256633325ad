"""Pairs for reward models and DPO from the rollouts of a run: a right against a wrong answer that the policy gave to
one question in one step.

    python examples/rollout_pairs.py runs/quickstart data/own_pairs

Such pairs show a reward model what the policy really writes, unfinished and beside the point included; a policy that
is trained with it finds fewer answers that it has never seen. Questions, not pairs, are split: a fifth of them is
test.jsonl. A question has at most `PER_QUESTION` pairs of a step.
"""

import json
import sys
from itertools import islice, product
from pathlib import Path

import proxima
from proxima.data.random import share_of

HELD_OUT, PER_QUESTION = 0.2, 4


def main(run, folder):
    split = {"train": [], "test": []}
    rows = proxima.load_run(run).rollouts(columns=["step", "prompt_uid", "question", "text", "correct"])
    for (_, _, question), group in rows.groupby(["step", "prompt_uid", "question"]):
        group = group[group["text"].str.strip() != ""]
        texts = [dict.fromkeys(group[group["correct"] == verdict]["text"]) for verdict in (True, False)]
        part = "test" if share_of(question) < HELD_OUT else "train"
        for chosen, rejected in islice(product(*texts), PER_QUESTION):
            split[part].append({"question": question, "chosen": chosen, "rejected": rejected})
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, pairs in split.items():
        text = "".join(json.dumps(pair) + "\n" for pair in pairs)
        Path(folder, f"{name}.jsonl").write_text(text, encoding="utf-8")
        count = len({pair["question"] for pair in pairs})
        print(f"{folder}/{name}.jsonl: {len(pairs):,} pairs of {count:,} questions")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
