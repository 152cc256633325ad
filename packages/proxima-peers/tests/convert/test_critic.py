"""verl's critic: `adv_estimator=gae` with the options of `critic`."""

from proxima.config import resolve
from proxima.core.advantage.token import Gae
from proxima.core.value import ValueLoss

from .conftest import names

GAE = {"algorithm.adv_estimator": "gae"}
BATCH = {"data.train_batch_size": 64, "actor_rollout_ref.actor.ppo_mini_batch_size": 16}


def critic_of(done):
    assert done.problems == ()
    return resolve(done.recipe).config.critic


def test_verls_defaults(converted):
    done = converted("verl", GAE)
    critic = critic_of(done)
    assert critic.loss == ValueLoss(epsilon=0.5) and critic.optimizer.lr == 1e-5
    assert (critic.bootstrap, critic.head_std, critic.value_warmup_steps, critic.max_grad_norm) == (False, 0.02, 0, 1.0)
    assert resolve(done.recipe).config.algorithm.advantage == Gae(1.0, 1.0)
    assert "critic.path" in names(done.missing)


def test_every_option_of_the_critic_has_its_field(converted):
    options = {
        "critic.model.path": "value/model",
        "critic.optim.lr": 3e-5,
        "critic.optim.weight_decay": 0.1,
        "critic.optim.betas": [0.8, 0.9],
        "critic.optim.lr_scheduler_type": "cosine",
        "critic.optim.min_lr_ratio": 0.2,
        "critic.optim.lr_warmup_steps": 5,
        "critic.grad_clip": 0.7,
        "critic.ppo_mini_batch_size": 8,
        "critic.ppo_epochs": 3,
        "critic.cliprange_value": 0.3,
        "critic.loss_agg_mode": "seq-mean-token-sum-norm",
        "critic.loss_scale_factor": 200,
        "critic.use_dynamic_bsz": True,
        "critic.ppo_max_token_len_per_gpu": 9000,
        "trainer.critic_warmup": 4,
        "trainer.total_training_steps": 100,
    }
    done = converted("verl", GAE | BATCH | options | {"algorithm.gamma": 0.99, "algorithm.lam": 0.95})
    critic = critic_of(done)
    assert critic.path == "value/model" and critic.loss.epsilon == 0.3 and critic.aggregate.horizon == 200
    optimizer = critic.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.beta1, optimizer.beta2) == (3e-5, 0.1, 0.8, 0.9)
    assert (critic.schedule, critic.final_lr_ratio, critic.max_grad_norm) == ("cosine", 0.2, 0.7)
    assert (critic.updates_per_step, critic.epochs_per_step, critic.tokens_per_micro_batch) == (8, 3, 9000)
    assert critic.warmup_steps == 5 * 8 * 3  # verl counts steps, of 8 updates 3 times over
    assert critic.value_warmup_steps == 3  # the policy's first update is in step number 4
    assert resolve(done.recipe).config.algorithm.advantage == Gae(0.99, 0.95)
    assert not names(done.unsupported) | names(done.unknown) | {"critic.path"} & names(done.missing)


def test_a_share_of_warm_up_waits_for_the_steps(converted):
    share = {"critic.model.path": "x", "critic.optim.lr_warmup_steps_ratio": 0.1}
    assert "critic.warmup_steps" in names(converted("verl", GAE | BATCH | share).missing)
    conversion = converted("verl", GAE | BATCH | share | {"trainer.total_training_steps": 50})
    assert critic_of(conversion).warmup_steps == 20  # of 50 steps of 4 updates


def test_what_the_critic_takes_from_the_actor(converted):
    """Batches and aggregation, but not the shape of its schedule."""
    actor = {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean", "critic.model.path": "x"}
    actor |= {"actor_rollout_ref.actor.optim.lr_warmup_steps": 7}
    critic = critic_of(converted("verl", GAE | BATCH | actor))
    assert type(critic.aggregate).__name__ == "SequenceMeanTokenMean"
    assert critic.updates_per_step is None and critic.warmup_steps == 0


def test_without_gae_there_is_no_critic(converted):
    options = {"critic.optim.lr": 1e-5, "critic.enable": True, "trainer.critic_warmup": 5}
    done = converted("verl", {"algorithm.adv_estimator": "grpo"} | options)
    assert set(options) <= names(done.ignored) and "critic" not in done.recipe


def test_what_the_critic_has_no_equal_for(converted):
    options = {"critic.enable": False, "critic.optim.optimizer": "muon", "critic.model.lora_rank": 8}
    options |= {"critic.rollout_n": 9, "critic.megatron.qat.enable": True, "critic.optim.learning_rate": 1}
    done = converted("verl", GAE | options)
    assert set(options) - {"critic.optim.learning_rate"} <= names(done.unsupported)
    assert "critic.optim.learning_rate" in names(done.unknown)


def test_micro_batches_of_the_critic_up_to_verl_0_7(converted):
    name = "critic.ppo_micro_batch_size_per_gpu"
    assert name in names(converted("verl", GAE | {name: 4}).unsupported)
    assert name in names(converted("verl", GAE | {name: 4, "trainer.use_v1": False}).ignored)
