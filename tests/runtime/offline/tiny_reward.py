"""Reward-model runs of seconds on a tiny model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxima.config import resolve
from proxima.config.sections.reward_model_section import RewardModelConfig
from proxima.runtime.launch.run import train
from proxima.runtime.state.summary import Summary
from tests.runtime.offline import tiny_sft
from tests.runtime.offline.tiny_dpo import preferences
from tests.runtime.tiny_run import changed


def recipe(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """4 steps of 4 of 10 pairs; `changes` as in `tiny_sft.recipe`."""
    tree = tiny_sft.recipe(model, folder)
    del tree["sft"], tree["eval"]["samples"], tree["eval"]["sample_tokens"]
    tree["task"] = {"kind": "jsonl", "path": str(preferences(folder, "pairs", 5)), "answer": None}
    tree["eval"]["task"] = {
        "kind": "jsonl",
        "path": str(preferences(folder, "test-pairs", 3, first=50)),
        "answer": None,
    }
    tree["reward_model"] = {"head_std": 0.1}
    return changed(tree, changes)


def go(folder: Path, tree: Mapping[str, Any], *, observer: Any = None, resume: bool = False) -> Summary:
    resolved = resolve({**tree, "folder": str(folder)}, root=RewardModelConfig)
    return train(resolved.config, resolved=resolved, observer=observer, resume=resume)
