"""The `critic` section: what it holds, what it takes from `train`, and what is refused."""

import json

from proxima.config.resolution import resolve
from proxima.config.validate import check
from proxima.core.aggregate import SequenceMeanTokenMean
from proxima.training.optimizer import AdamW


def problems(recipe, *overrides):
    chosen = [] if any(word.startswith("algorithm=") for word in overrides) else ["algorithm=ppo"]
    return [str(problem) for problem in check(resolve(recipe(), [*chosen, *overrides]))]


def test_a_critic_trains_as_the_policy_unless_it_says_otherwise(recipe):
    overrides = ["algorithm=ppo", "train.optimizer.lr=1e-5", "train.warmup_ratio=0.1", "train.updates_per_step=2"]
    own = [
        "critic=model",
        "critic.optimizer={kind: adamw, lr: 3e-5}",
        "critic.warmup_steps=7",
        "critic.epochs_per_step=4",
    ]
    config = resolve(recipe(), [*overrides, *own, "critic.aggregate=grpo"]).config
    training, train = config.critic.training(config.train), config.train
    assert training.optimizer == AdamW(lr=3e-5) and train.optimizer == AdamW(lr=1e-5)
    assert (training.warmup_of(100), train.warmup_of(100)) == (7, 10)
    assert (training.updates_per_step, training.epochs_per_step, train.epochs_per_step) == (2, 4, 1)
    assert config.critic.aggregate == SequenceMeanTokenMean()


def test_a_constant_rate_of_the_critic_beside_a_falling_one_of_the_policy(recipe):
    falls = ["algorithm=ppo", "train.schedule=linear", "train.final_lr_ratio=0.1"]
    config = resolve(recipe(), [*falls, "critic={kind: model, schedule: constant}"]).config
    training = config.critic.training(config.train)
    assert (training.schedule, training.final_lr_ratio) == ("constant", 0.0)


def test_the_spread_of_a_new_head_beside_a_head_that_exists(recipe, tmp_path):
    model = {"model_type": "llama", "num_labels": 1}
    for name, head in (("LlamaForSequenceClassification", True), ("LlamaForCausalLM", False)):
        (tmp_path / "config.json").write_text(json.dumps(model | {"architectures": [name]}))
        lines = problems(recipe, f"critic={{kind: model, path: {tmp_path}, head_std: 0.5}}")
        assert (
            lines
            == [f"critic.head_std=0.5 (command line): is for a new head, and {tmp_path} has one; set it to 0"] * head
        )
