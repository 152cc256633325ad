"""The `critic` section: what it holds, what it takes from `train`, and what is refused."""

import json

import pytest

from proxima.config import check, resolve
from proxima.config.problems import ConfigError
from proxima.config.sections.critic_section import HeadCritic, ModelCritic
from proxima.core.aggregate import SequenceMeanTokenMean, TokenMean
from proxima.core.value import ValueLoss
from proxima.train import AdamW


def problems(recipe, *overrides):
    chosen = [] if any(word.startswith("algorithm=") for word in overrides) else ["algorithm=ppo"]
    return [str(problem) for problem in check(resolve(recipe(), [*chosen, *overrides]))]


def critic_of(recipe, *overrides):
    return resolve(recipe(), ["algorithm=ppo", *overrides]).config.critic


def test_kinds_and_their_fields(recipe):
    assert critic_of(recipe) is None
    model = critic_of(recipe, "critic=model")
    assert model == ModelCritic(loss=ValueLoss(), aggregate=TokenMean()) and model.bootstrap and model.path is None
    head = critic_of(recipe, "critic={kind: head, coefficient: 0.5, loss: {error: huber, delta: 2}}")
    assert head == HeadCritic(loss=ValueLoss(error="huber", delta=2.0), aggregate=TokenMean(), coefficient=0.5)
    assert problems(recipe, "critic=model") == problems(recipe, "critic=head") == []
    assert problems(recipe, "algorithm.advantage=optimal_token_baseline") == []
    assert problems(recipe, "algorithm.advantage=reinforce_pp") == []


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
    (line,) = problems(recipe, "train.schedule=linear", "critic={kind: model, schedule: constant, final_lr_ratio: 0.1}")
    message = "critic.final_lr_ratio=0.1 (command line): must be 0 with schedule=constant, which does not fall"
    assert line.startswith(message)


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (
            [],
            "algorithm.advantage.kind=gae (preset ppo, chosen in command line): 'gae' needs `value`; set critic=model",
        ),
        (
            ["algorithm.advantage=grpo", "critic=model"],
            "critic.kind=model (command line): 'grpo' reads no values, so the critic would only cost time; set "
            "algorithm.advantage=gae, or critic=null",
        ),
        (
            ["critic={kind: model, updates_per_step: 3}"],
            "critic.updates_per_step=3 (command line): must divide prompts_per_step=8",
        ),
        (["critic={kind: model, max_grad_norm: -1}"], "critic.max_grad_norm=-1 (command line): must be >= 0"),
        (
            ["critic={kind: model, value_warmup_steps: 5}", "train.steps=5"],
            "critic.value_warmup_steps=5 (command line): the policy would wait for all 5 steps of the run",
        ),
        (
            ["algorithm={preset: distill, distillation: {path: org/teacher}, advantage: gae}", "critic=model"],
            "critic.kind=model (command line): predicts rewards, which are only measured; set critic=null",
        ),
        (["critic={kind: model, path: nowhere/none/x}"], "critic.path=nowhere/none/x (command line): does not exist"),
    ],
)
def test_what_does_not_fit(overrides, start, recipe):
    (line,) = problems(recipe, *overrides)
    assert line.startswith(start)


def test_the_spread_of_a_new_head_beside_a_head_that_exists(recipe, tmp_path):
    for name, head in (("LlamaForSequenceClassification", True), ("LlamaForCausalLM", False)):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        lines = problems(recipe, f"critic={{kind: model, path: {tmp_path}, head_std: 0.5}}")
        assert (
            lines
            == [f"critic.head_std=0.5 (command line): is for a new head, and {tmp_path} has one; set it to 0"] * head
        )


@pytest.mark.parametrize(
    ("critic", "said"),
    [
        ("{kind: head, coefficient: 0}", "critic.coefficient=0 (command line): must be > 0 and finite"),
        ("{kind: head, head_std: -1}", "critic.head_std=-1 (command line): must be >= 0 and finite"),
        ("{kind: model, revision: main}", "critic.revision=main (command line): must be null without a path"),
        ("{kind: model, loss: {epsilon: 0}}", "critic.loss.epsilon=0 (command line): must be > 0; inf turns"),
        ("{kind: head, path: x}", "critic.path=x (command line): 'head' has no field 'path'"),
        ("{kind: modle}", "critic.kind=modle (command line): no critic 'modle'; did you mean 'model'?"),
    ],
)
def test_fields_that_are_refused(critic, said, recipe):
    with pytest.raises(ConfigError) as caught:
        critic_of(recipe, f"critic={critic}")
    assert str(caught.value).startswith(said)
