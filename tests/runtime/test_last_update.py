"""The last update of a run trains: no schedule has a learning rate of 0 there."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.runtime import tiny_run
from tests.runtime.offline import tiny_dpo, tiny_reward, tiny_sft

SHARE = {"kind": "tests.runtime.tiny_run:Share"}  # every group has an advantage
CRITIC = {"algorithm": "ppo", "critic": {"kind": "model"}}


def group_recipe(model, folder, **changes):
    return tiny_run.recipe(model, **{"reward": [SHARE], **changes})


RUNS = {
    "train": (group_recipe, tiny_run.go, {}, "linear"),
    "train, cosine": (group_recipe, tiny_run.go, {}, "cosine"),
    "ppo": (group_recipe, tiny_run.go, CRITIC, "linear"),
    "sft": (tiny_sft.recipe, tiny_sft.go, {}, "cosine"),
    "reward": (tiny_reward.recipe, tiny_reward.go, {}, "linear"),
    "dpo": (tiny_dpo.recipe, tiny_dpo.go, {}, "cosine"),
}


@pytest.mark.parametrize("command", RUNS)
def test_both_steps_of_a_run_of_two_change_the_weights(command, tiny_model, tmp_path):
    recipe, go, changes, schedule = RUNS[command]
    short = {"train__steps": 2, "train__warmup_steps": 0, "train__schedule": schedule, "eval__every": 0}
    folder = tmp_path / "run"
    go(folder, recipe(tiny_model("llama"), tmp_path / "data", **changes, **short))
    steps = sorted(path for path in (folder / "checkpoints").iterdir() if path.is_dir())
    assert len(steps) == 2
    trained = sorted(file.relative_to(steps[0]) for file in steps[0].rglob("model.safetensors"))
    assert len(trained) == (2 if command == "ppo" else 1)
    for file in trained:
        first, second = (load_file(step / file) for step in steps)
        assert not all(torch.equal(first[name], second[name]) for name in first), file
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in lines if "lr" in line]
    assert rates == pytest.approx([3e-3, 1.5e-3])
