"""Realistic files, converted whole: the numbers, where they came from, and what is listed."""

from proxima.core.aggregate import SequenceMeanTokenSumNorm, TokenMean
from proxima.core.correction.importance import CapFloor, Importance
from proxima.core.correction.rejection import OffPolicySequence, Rejection, TopEntropy
from proxima.core.penalty import K3
from proxima.core.selection.group_selection import DropTruncated, DropUniformGroups
from proxima.core.surrogate.clip import PpoClip
from proxima.core.surrogate.cppo import Cppo
from proxima.core.surrogate.weight import Cispo
from proxima.engine import LocalProcess
from proxima.engine.http.vllm import Vllm
from proxima.rollout.dynamic_sampling import DynamicSampling

from .conftest import names


def test_verl_dapo(example):
    done, resolved = example("verl_dapo.yaml", "verl")
    config = resolved.config
    assert config.algorithm.surrogate == PpoClip(0.2, 0.28, 10.0)
    assert config.algorithm.aggregate == TokenMean()
    assert config.algorithm.proximal == "recompute"
    assert config.algorithm.selection == (DropUniformGroups("accuracy"),)
    assert config.algorithm.dynamic_sampling == DynamicSampling(
        max_num_gen_batches=10, exhausted="stop", oversample=3.0
    )
    assert config.runtime.max_lag == 0
    assert config.algorithm.correction == (
        Rejection("sequence", "ratio", "mean", 1.001, 0.999, "drop"),
        Rejection("sequence", "k3", "mean", 0.01, None, "drop"),
        Importance("token", "truncate", 2.0, normalise=True),
    )
    assert (config.train.prompts_per_step, config.train.updates_per_step, config.train.completions_per_prompt) == (
        512,
        16,
        16,
    )
    assert (config.train.steps, config.train.warmup_steps, config.train.tokens_per_micro_batch) == (
        400,
        160,
        22528,
    )  # 10 steps of 16 updates
    assert (config.train.optimizer.lr, config.train.optimizer.weight_decay, config.train.optimizer.beta2) == (
        1e-6,
        0.1,
        0.95,
    )
    assert (config.sampling.max_tokens, config.sampling.top_k, config.model.max_length) == (20480, 0, 22528)
    assert config.model.path == "Qwen/Qwen2.5-32B" and config.task.path == "data/dapo-math-17k.parquet"
    assert names(done.unknown) == {"actor_rollout_ref.actor.clip_ratio_hgih"}
    assert "did you mean 'actor_rollout_ref.actor.clip_ratio_high'?" in done.unknown[0].why
    assert not done.unsupported
    assert (config.eval.task.path, config.eval.every, config.eval.limit) == ("data/aime-2024.parquet", 5, 0)
    assert (config.eval.samples, config.eval.sampling.temperature) == (1, 0)  # verl takes the most probable token
    assert {"actor_rollout_ref.actor.kl_loss_coef", "trainer.project_name"} <= names(done.ignored)
    assert isinstance(config.engine, Vllm) and config.engine.serve is not None
    assert names(done.missing) == {"reward.0", "reward_model.reward_manager"}
    assert done.problems == ()
    assert "    epsilon_high: 0.28  # from actor_rollout_ref.actor.clip_ratio_high\n" in done.text
    assert "    kind: ppo_clip  # verl's default of actor_rollout_ref.actor.policy_loss.loss_mode\n" in done.text
    assert "# unknown option:\n#   actor_rollout_ref.actor.clip_ratio_hgih: " in done.text


def test_trl_from_a_script_that_is_never_run(example):
    done, resolved = example("trl_grpo.py", "trl")
    config = resolved.config
    assert config.algorithm.surrogate == Cispo(1.0, 4.0, "token")  # TRL's 5.0 is the cap itself
    assert config.algorithm.correction == (
        Importance("token", "clip", 2.0, 0.0),
        OffPolicySequence(0.5),
        TopEntropy(0.2),
    )
    assert config.algorithm.reference_kl == K3(0.001, unbiased=True)
    assert config.algorithm.selection == (DropTruncated(),)
    assert (config.algorithm.advantage.scale, config.algorithm.advantage.epsilon) == ("batch", 1e-4)
    assert config.sampling.max_tokens == 4096
    train = config.train
    assert (train.prompts_per_step, train.updates_per_step, train.epochs_per_step, train.completions_per_prompt) == (
        16,
        2,
        2,
        16,
    )
    assert (train.steps, train.warmup_steps, train.schedule) == (
        100,
        40,
        "cosine",
    )  # 400 optimizer steps, 4 in a step; a tenth of 400
    assert config.model.path == "Qwen/Qwen2.5-3B-Instruct"
    assert names(done.unknown) == {"epsilon_hihg"}
    assert "repetition_penalty" in names(done.unsupported)
    assert isinstance(config.engine, Vllm) and config.engine.serve.gpu_memory == 0.4
    assert names(done.missing) == {"reward.0", "train.prompts_per_step"}  # the number of processes
    assert config.task.path == "x"  # load_dataset("x")


def test_areal_decoupled(example):
    done, resolved = example("areal_async.yaml", "areal")
    config = resolved.config
    assert config.algorithm.proximal == "recompute"
    assert config.algorithm.correction == (CapFloor(upper=5.0, lower=0.2),)
    assert config.algorithm.surrogate == PpoClip(0.4, 0.4)
    assert (config.algorithm.advantage.scale, config.algorithm.advantage.finish) == ("group", "tokens")
    assert (config.train.prompts_per_step, config.train.completions_per_prompt, config.train.updates_per_step) == (
        256,
        4,
        4,
    )
    assert (config.train.optimizer.lr, config.train.warmup_steps) == (1.7e-5, 116)  # 29 steps of 4 updates
    assert (config.sampling.temperature, config.sampling.top_k) == (0.9, 0)
    assert [type(entry).__name__ for entry in config.reward] == ["Gsm8kReward"] and config.reward[
        0
    ].weight == 1  # the scaling cancels
    assert (config.runtime.max_lag, config.runtime.max_concurrent_rollouts) == (2, 256)
    assert isinstance(config.engine, LocalProcess)
    assert "actor.kl_ctl" in names(done.unsupported)
    assert names(done.unknown) == {"rollout.pauze"}
    assert "actor.reward_scaling" in names(done.ignored)
    assert done.missing == []


def test_unirl_cppo(example):
    done, resolved = example("unirl_cppo.yaml", "unirl")
    config = resolved.config
    assert config.algorithm.proximal == "behavior"
    assert config.algorithm.surrogate == Cppo(0.15, 0.8, 0.02)
    assert config.algorithm.aggregate == SequenceMeanTokenSumNorm(16384)
    assert config.algorithm.advantage.scale == "none"
    assert (config.train.steps, config.train.updates_per_step, config.train.tokens_per_micro_batch, config.seed) == (
        800,
        4,
        10240,
        42,
    )
    assert config.model.path == "Qwen/Qwen3-4B-Base"  # the default inside ${oc.env:…}; the environment is not looked at
    assert config.task.path == "data/dapo_math/train.jsonl"
    assert names(done.unknown) == {"algorithm.cppo_gamma"}
    assert {"eval.task"} <= names(done.missing) and "eval_interval" in " ".join(option.why for option in done.missing)
