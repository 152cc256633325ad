"""SFT runs of seconds on a tiny model."""

import json
from pathlib import Path
from typing import Any

from tests.runtime.tiny_run import changed


def sums(folder: Path, name: str, count: int, first: int = 0) -> Path:
    """A file of additions: question and answer."""
    file = folder / f"{name}.jsonl"
    numbers = range(first, first + count)
    rows = [{"question": f"What is {a} + {a % 3}?", "answer": f"It is {a + a % 3}."} for a in numbers]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def recipe(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """4 steps of 4 of 10 rows, with held-out rows and samples; `changes`: dotted keys with `__` for the dots."""
    folder.mkdir(parents=True, exist_ok=True)
    tree: dict[str, Any] = {
        "model": {"path": str(model), "compute_dtype": "float32", "device": "cpu"},
        "task": {"kind": "jsonl", "path": str(sums(folder, "train", 10))},
        "sft": {},
        "train": {
            "steps": 4,
            "examples_per_step": 4,
            "optimizer": {"kind": "adamw", "lr": 3e-3},
            "warmup_steps": 2,
            "schedule": "cosine",
            "tokens_per_micro_batch": 100,
        },
        "eval": {
            "task": {"kind": "jsonl", "path": str(sums(folder, "test", 5, first=50))},
            "every": 2,
            "samples": 2,
            "sample_tokens": 6,
        },
        "checkpoint": {"every": 1, "keep_last": 0},
        "runtime": {"threads": 1},
        "seed": 3,
    }
    return changed(tree, changes)
