"""Reward-model runs of seconds on a tiny model."""

from pathlib import Path
from typing import Any

from tests.runtime.offline import tiny_dpo
from tests.runtime.tiny_run import changed


def recipe(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """4 steps of 4 of 10 pairs, with others held out; `changes` as in `tiny_sft.recipe`."""
    tree = tiny_dpo.recipe(model, folder)
    del tree["preference"]
    tree["eval"]["task"]["path"] = str(tiny_dpo.preferences(folder, "test-pairs", 3, first=50))
    tree["reward_model"] = {"head_std": 0.1}
    return changed(tree, changes)
