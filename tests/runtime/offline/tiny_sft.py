"""SFT runs of seconds on a tiny model."""

from pathlib import Path
from typing import Any

from tests.prepare.published import write_jsonl
from tests.runtime import tiny_run


def sums(folder: Path, name: str, count: int, first: int = 0) -> Path:
    """A file of additions: question and answer."""
    numbers = range(first, first + count)
    rows = [{"question": f"What is {a} + {a % 3}?", "answer": f"It is {a + a % 3}."} for a in numbers]
    return write_jsonl(folder / f"{name}.jsonl", rows)


def recipe(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """4 steps of 4 of 10 rows, with held-out rows and samples; `changes`: dotted keys with `__` for the dots."""
    held_out = {"kind": "jsonl", "path": str(sums(folder, "test", 5, first=50))}
    tree = tiny_run.recipe(
        model,
        task={"kind": "jsonl", "path": str(sums(folder, "train", 10))},
        sft={},
        train__steps=4,
        train__examples_per_step=4,
        train__tokens_per_micro_batch=100,
        eval={"task": held_out, "every": 2, "samples": 2, "sample_tokens": 6},
        runtime={"threads": 1},
    )
    for section in ("reward", "algorithm", "engine", "sampling"):
        del tree[section]
    del tree["train"]["prompts_per_step"], tree["train"]["completions_per_prompt"]
    return tiny_run.changed(tree, changes)
