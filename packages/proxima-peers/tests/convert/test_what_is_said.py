"""What a conversion says of an option that has no value here, or a value that the file does not settle."""

import pytest

from .conftest import listed, why

ROWS = {"dataset_name": "org/rows", "model_name_or_path": "org/m"}
KINDS = {
    "sft": {"completion_only_loss": True},
    "dpo": {"loss_type": "sigmoid"},
    "kto": {"desirable_weight": 1.0},
    "reward": {"center_rewards_coefficient": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_length_without_a_bound_is_left_out_and_named(converted, kind):
    done = converted("trl", ROWS | KINDS[kind] | {"max_length": None})
    assert "max_length" not in done.recipe.get("model", {})
    assert "max_length" in listed(done)["ignored"]
    bounded = converted("trl", ROWS | KINDS[kind] | {"max_length": 300})
    assert bounded.recipe["model"]["max_length"] == 300
    assert "max_length" not in listed(bounded)["ignored"]


@pytest.mark.slow
@pytest.mark.parametrize(("given", "said"), [({"num_train_epochs": 4}, ", here 4: steps"), ({}, "by default: steps")])
def test_epochs_of_a_file_are_said_where_the_steps_must_be_filled_in(converted, given, said):
    done = converted("trl", {"num_generations": 8, "model_name_or_path": "org/m"} | given)
    assert said in why(done.missing)["train.steps"]
    named = converted("trl", {"num_generations": 8, "model_name_or_path": "org/m", "max_steps": 70} | given)
    assert named.recipe["train"]["steps"] == 70
    assert ("num_train_epochs" in listed(named)["ignored"]) == bool(given)
