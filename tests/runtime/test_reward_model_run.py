"""RL with a reward model as the reward: what is refused before a run, and what a plan counts."""

import pytest
from transformers import AutoModelForSequenceClassification

from proxima.config.resolution import resolve
from proxima.config.validate import check
from proxima_plan.devices import read_devices
from proxima_plan.forecast import plan_recipe
from tests.runtime.tiny_run import recipe


@pytest.fixture
def scorer(runs):
    return runs.scorer()


def test_the_reward_model_is_checked_with_the_recipe(scorer, tiny_model):
    def problems(**fields):
        reward = {"kind": "model", "path": scorer, **fields}
        return [str(problem) for problem in check(resolve({**recipe(tiny_model("llama")), "reward": [reward]}))]

    assert problems() == []
    (line,) = problems(path=str(tiny_model("llama")))
    assert line.startswith("reward.0.path=") and "has no scalar head" in line
    (line,) = problems(normalize=True)
    assert line.startswith("reward.0.normalize=true") and line.endswith("or set normalize=false")
    sets = [{"name": "own", "task": {"kind": "arithmetic"}, "reward": [{"kind": "model", "path": "/nowhere"}]}]
    tree = recipe(tiny_model("llama"), eval__sets=sets)
    (line,) = (str(problem) for problem in check(resolve(tree)))
    assert line.startswith("eval.sets.0.reward.0.path=/nowhere") and "does not exist" in line


@pytest.mark.slow
def test_a_plan_counts_the_weights_of_reward_models(scorer, runs, tiny_model):
    (devices,) = read_devices("H100-80G")
    weights = AutoModelForSequenceClassification.from_pretrained(scorer).parameters()
    judged, plain = (
        plan_recipe(resolve(tree), devices) for tree in (runs.tree("scored by a model"), recipe(tiny_model("llama")))
    )
    assert judged.load.beside == 4 * sum(p.numel() for p in weights) and plain.load.beside == 0
    assert judged.memory.needed > judged.load.beside
