"""DPO runs of seconds on a tiny model."""

from pathlib import Path
from typing import Any

from tests.prepare.published import write_jsonl
from tests.runtime.offline import tiny_sft
from tests.runtime.tiny_run import changed


def preferences(folder: Path, name: str, count: int, first: int = 0) -> Path:
    """A file of pairs, two of each question, with the same as labeled completions and a margin: the right sum against
    another number."""
    rows = [
        {
            "question": f"{a} + {a % 3}?",
            "chosen": f"It is {a + a % 3}.",
            "rejected": f"It is {a + wrong}.",
            "completion": f"{a + (wrong if a % 2 else a % 3)}!",
            "label": a % 2 == 0,
            "lead": 0.5,
        }
        for a in range(first, first + count)
        for wrong in (3, 40)
    ]
    return write_jsonl(folder / f"{name}.jsonl", rows)


def recipe(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """4 steps of 4 of 10 pairs, six of which are held out too, as so small a model learns by heart; `changes` as in
    `tiny_sft.recipe`."""
    tree = tiny_sft.recipe(model, folder)
    del tree["sft"], tree["eval"]["samples"], tree["eval"]["sample_tokens"]
    tree["task"] = {"kind": "jsonl", "path": str(preferences(folder, "preferences", 5)), "answer": None}
    tree["eval"]["task"] = tree["task"] | {"path": str(preferences(folder, "held-out", 3))}
    tree["preference"] = {"loss": [{"kind": "sigmoid", "beta": 0.5}], "cache": str(folder / "cache")}
    return changed(tree, changes)
