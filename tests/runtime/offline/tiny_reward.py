"""Reward-model runs of seconds on a tiny model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxima.config import resolve
from proxima.config.sections.reward_model_section import RewardModelConfig
from proxima.runtime.launch.run import train
from proxima.runtime.state.summary import Summary
from tests.runtime.offline import tiny_sft
from tests.runtime.tiny_run import changed


def pairs(folder: Path, name: str, count: int, first: int = 0) -> Path:
    """A file of pairs, two of each question: the right sum against another number."""
    file = folder / f"{name}.jsonl"
    rows = [
        {"question": f"{a} + {a % 3}?", "chosen": f"It is {a + a % 3}.", "rejected": f"It is {a + wrong}.", "lead": 0.5}
        for a in range(first, first + count)
        for wrong in (3, 40)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def recipe(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """4 steps of 4 of 10 pairs; `changes` as in `tiny_sft.recipe`."""
    tree = tiny_sft.recipe(model, folder)
    del tree["sft"], tree["eval"]["samples"], tree["eval"]["sample_tokens"]
    tree["task"] = {"kind": "jsonl", "path": str(pairs(folder, "pairs", 5)), "answer": None}
    tree["eval"]["task"] = {"kind": "jsonl", "path": str(pairs(folder, "test-pairs", 3, first=50)), "answer": None}
    tree["reward_model"] = {"head_std": 0.1}
    return changed(tree, changes)


def go(folder: Path, tree: Mapping[str, Any], *, observer: Any = None, resume: bool = False) -> Summary:
    resolved = resolve({**tree, "folder": str(folder)}, root=RewardModelConfig)
    return train(resolved.config, resolved=resolved, observer=observer, resume=resume)
