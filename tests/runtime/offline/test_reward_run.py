"""Runs that train a reward model: resumed to the bit, saved for Hugging Face and for RL, and what they refuse."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from proxima.config.sections.preference import RewardModelConfig
from proxima.config.validate import load_recipe
from proxima.data import UserError
from proxima.reward.model_reward import ModelReward
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.run_checkpoints import export
from tests.runtime.tiny_run import evals_of, go, saved_in, steps_of

pytestmark = pytest.mark.slow


@pytest.fixture
def tree(runs):
    return partial(runs.tree, "reward model")


@pytest.fixture
def unbroken(runs):
    return runs.finished("reward model")


def test_the_run_leaves_a_model_for_hugging_face_and_for_rl(unbroken, tmp_path):
    """What is exported loads as a sequence classifier, and is a reward, normalised by the last evaluation."""
    export(str(unbroken), tmp_path / "exported")
    record = evals_of(unbroken)[-1]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported")
    assert model.config.num_labels == 1
    expected = {"mean": record["score/mean"], "std": record["score/std"]}
    assert model.config.reward_normalization == expected
    ModelReward(path=str(tmp_path / "exported"), normalize=True).check()
    last = saved_in(unbroken)[-1].model
    again = AutoModelForSequenceClassification.from_pretrained(last)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert {"accuracy", "accuracy/low", "length_only/accuracy", "random/accuracy", "calibration/error"} <= record.keys()


def test_training_continues_from_a_reward_model(unbroken, tree, tmp_path):
    """Its head stays; from a language model the head is drawn by the run's seed."""
    last = saved_in(unbroken)[-1].model
    head = AutoModelForSequenceClassification.from_pretrained(last).score.weight
    go(tmp_path / "run", tree(model__path=str(last), train__optimizer__lr=0.0, train__steps=1))
    kept = saved_in(tmp_path / "run")[-1].model
    assert torch.equal(AutoModelForSequenceClassification.from_pretrained(kept).score.weight, head)


def test_margins_of_the_data_change_the_run(unbroken, tree, tmp_path):
    go(tmp_path / "run", tree(reward_model__margin_column="lead", train__steps=1))
    go(tmp_path / "same", tree(reward_model__margin=0.5, train__steps=1))
    first, same, other = (
        [r["loss"] for r in steps_of(folder)] for folder in (tmp_path / "run", tmp_path / "same", unbroken)
    )
    assert first == same and first[0] > other[0]


def test_a_head_that_exists_is_not_drawn_anew(unbroken, tree):
    trained = str(RunFolder(unbroken).checkpoint(4) / "model")
    with pytest.raises(UserError, match=r"head_std=0.1 .*is for a new head, and .* has one, which is trained further"):
        load_recipe(tree(model__path=trained), root=RewardModelConfig)
    load_recipe(tree(model__path=trained, reward_model__head_std=0.02), root=RewardModelConfig)
