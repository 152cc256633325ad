"""SkyRL's files: what each option becomes, what is to fill in, and which files are refused."""

from pathlib import Path
from typing import Any

import pytest

from proxima.cli.main import main
from proxima.config.resolution import resolve
from proxima_peers.convert.conversion import convert, likely_peers
from proxima_peers.convert.draft import Draft

from .conftest import EXAMPLES, names, why

BASE = {"trainer.policy.model.path": "org/m", "data.train_data": ["~/data/gsm8k/train.parquet"]}
BASE |= {"environment.env_class": "gsm8k", "trainer.max_training_steps": 10}
A, C, S = "trainer.algorithm.", "trainer.algorithm.off_policy_correction.", "trainer.fully_async."


@pytest.fixture
def skyrl(converted):
    """`skyrl({…})`: the conversion of options beside those of `BASE`."""

    def run(options: dict[str, Any]) -> Draft:
        done: Draft = converted("skyrl", BASE | options)
        assert done.problems == ()
        resolve(done.filled, root=None, import_code=False)
        return done

    return run


def test_a_script_with_defaults_of_its_own_becomes_a_whole_recipe():
    done = convert(EXAMPLES / "skyrl_gsm8k.sh", "skyrl")
    made = done.recipe
    assert done.missing == [] and done.unknown == [] and done.problems == ()
    assert made["task"] == {"kind": "gsm8k"} and made["reward"] == [{"kind": "gsm8k"}]
    assert made["eval"]["task"] == {"kind": "gsm8k", "split": "test"} and made["eval"]["every"] == 5
    assert made["engine"]["serve"]["replicas"] == 2  # of `: "${GPUS:=2}"`
    train = made["train"]
    assert (train["prompts_per_step"], train["completions_per_prompt"], train["updates_per_step"]) == (64, 8, 4)
    assert (train["steps"], train["warmup_steps"], train["optimizer"]["lr"]) == (50, 8, 2e-6)
    assert made["algorithm"]["surrogate"] == {
        "kind": "ppo_clip", "epsilon_low": 0.2, "epsilon_high": 0.28, "dual_clip": 3.0
    }  # fmt: skip
    assert made["algorithm"]["correction"] == [
        {"kind": "importance", "level": "token", "bound": "truncate", "upper": 2.0}
    ]
    assert made["algorithm"]["selection"] == [{"kind": "drop_uniform_groups"}]
    assert "reference_kl" not in made["algorithm"]
    assert {"trainer.strategy", "trainer.placement.policy_num_gpus_per_node"} <= names(done.ignored)
    assert likely_peers(EXAMPLES / "skyrl_gsm8k.sh") == ["skyrl"]


def test_every_option_of_the_file_is_in_the_recipe():
    text = (EXAMPLES / "skyrl_gsm8k.sh").read_text()
    options = [line.split("=")[0].strip() for line in text.splitlines() if line.startswith("  ")]
    recipe = convert(EXAMPLES / "skyrl_gsm8k.sh", "skyrl").text
    assert [name for name in options if "." in name and name not in recipe] == []


@pytest.mark.parametrize(
    ("options", "kind", "fields"),
    [
        ({}, "ppo_clip", {"epsilon_low": 0.2, "epsilon_high": 0.2, "dual_clip": None}),
        ({A + "policy_loss_type": "gspo", A + "eps_clip_low": 3e-4}, "gspo", {"epsilon_low": 3e-4, "form": "token"}),
        ({A + "policy_loss_type": "cispo"}, "cispo", {"epsilon_low": 1.0, "epsilon_high": 4.0}),
        ({A + "policy_loss_type": "sapo", A + "sapo.tau_neg": 2.0}, "sapo", {"tau_negative": 2.0}),
        ({A + "policy_loss_type": "dppo", A + "dppo.delta_low": 0.1}, "dppo", {"delta": 0.2, "delta_low": 0.1}),
        ({A + "policy_loss_type": "clip_cov"}, "clip_cov", {"share": 2e-4, "low": 1.0, "high": 5.0}),
        ({A + "policy_loss_type": "kl_cov"}, "kl_cov", {"share": 0.2, "coefficient": 1.0}),
    ],
)
def test_losses(skyrl, options, kind, fields):
    algorithm = resolve(skyrl(options).filled).config.algorithm
    surrogate = algorithm.surrogate
    assert type(surrogate).__name__.lower() == kind.replace("_", "")
    assert {name: getattr(surrogate, name) for name in fields} == fields


def test_the_policy_that_a_loss_is_measured_from(skyrl):
    def proximal(**options):
        done = skyrl({A + "policy_loss_type": options.pop("loss"), **{A + k: v for k, v in options.items()}})
        return done.recipe["algorithm"]["proximal"]

    assert proximal(loss="regular") == proximal(loss="cispo") == "recompute"
    assert proximal(loss="dppo") == proximal(loss="cispo", **{"cispo.cispo_anchor": "rollout"}) == "behavior"


def test_the_rollouts_own_ratio_weighs_reinforce(skyrl):
    options = {A + "policy_loss_type": "rollout_is", A + "eps_clip_low": 0.3, C + "sequence_mask_metric": "geometric"}
    made = skyrl(options).recipe["algorithm"]
    weight, mask = made["correction"]
    assert made["surrogate"] == {"kind": "reinforce"}
    assert weight == {"kind": "importance", "bound": "clip", "upper": 1.2, "lower": 0.7, "towards": "current"}
    assert (mask["kind"], mask["level"], mask["reduce"], mask["upper"], mask["lower"]) == (
        *("rejection", "sequence", "mean", 1.01, 0.99),
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({C + "tis_ratio_type": "sequence"}, [("importance", "sequence", 5.0)]),
        ({A + "use_tis": True, A + "tis_imp_ratio_cap": 3.0}, [("importance", "token", 3.0)]),
        ({C + "sequence_mask_metric": "product"}, [("rejection", "sequence", 2.0)]),
        ({C + "outlier_token_is_threshold_high": 100.0}, [("rejection", "sequence", 100.0)]),
        ({C + "token_mask_is_threshold_high": 4.0}, [("rejection", "token", 4.0)]),
        ({C + "token_tis_ratio_clip_high": 4.0}, []),
        ({A + "policy_loss_type": "kl_cov", C + "tis_ratio_type": "token"}, []),
    ],
)
def test_corrections(skyrl, options, expected):
    made = skyrl(options).recipe["algorithm"].get("correction", [])
    assert [(spec["kind"], spec["level"], spec["upper"]) for spec in made] == expected


def test_a_token_far_below_the_rollouts_rejects_its_sequence(skyrl):
    made = skyrl({C + "outlier_token_is_threshold_low": 1e-4}).recipe["algorithm"]["correction"]
    assert made == [{"kind": "importance", "bound": "none", "veto": 1e-4}]


def test_a_correction_of_a_loss_that_measures_from_the_rollout_is_named(skyrl):
    done = skyrl({A + "policy_loss_type": "dppo", C + "tis_ratio_type": "token"})
    assert C + "tis_ratio_type" in names(done.unsupported) and "correction" not in done.recipe["algorithm"]


@pytest.mark.parametrize(
    ("options", "advantage"),
    [
        ({}, {"kind": "grpo", "scale": "group", "epsilon": 1e-6}),
        ({A + "grpo_norm_by_std": False}, {"kind": "grpo", "scale": "none", "epsilon": 1e-6}),
        ({A + "advantage_estimator": "rloo"}, {"kind": "rloo"}),
        ({A + "advantage_estimator": "reinforce++", A + "gamma": 0.9}, {"kind": "reinforce_pp", "gamma": 0.9}),
        ({A + "advantage_estimator": "gae", A + "lambd": 0.95}, {"kind": "gae", "gamma": 1.0, "lam": 0.95}),
    ],
)
def test_advantages(skyrl, options, advantage):
    assert skyrl(options).recipe["algorithm"]["advantage"] == advantage


def test_a_critic_is_converted_with_gae_only(skyrl):
    own = {"trainer.critic.model.path": "org/c", "trainer.critic.optimizer_config.lr": 3e-6, A + "value_clip": 0.3}
    made = skyrl(own | {A + "advantage_estimator": "gae"}).recipe["critic"]
    assert (made["path"], made["optimizer"]["lr"], made["loss"]["epsilon"]) == ("org/c", 3e-6, 0.3)
    assert set(own) <= names(skyrl(own).ignored)


@pytest.mark.parametrize("estimator", ["maxrl", "mine"])
def test_an_estimator_or_loss_of_ones_own_is_to_fill_in(skyrl, estimator):
    assert "algorithm.advantage" in names(skyrl({A + "advantage_estimator": estimator}).missing)
    assert "algorithm.surrogate" in names(skyrl({A + "policy_loss_type": estimator}).missing)


def test_reductions(skyrl):
    def aggregate(options):
        return skyrl(options).recipe["algorithm"]["aggregate"]

    assert aggregate({A + "loss_reduction": "sequence_mean"}) == {"kind": "sequence_mean_token_mean"}
    length = {A + "loss_reduction": "seq_mean_token_sum_norm", A + "max_seq_len": 4096}
    assert aggregate(length) == {"kind": "sequence_mean_token_sum_norm", "horizon": 4096}
    older = skyrl({A + "loss_reduction": "token_mean_legacy", "trainer.micro_train_batch_size_per_gpu": 4})
    assert {A + "loss_reduction", "trainer.micro_train_batch_size_per_gpu"} <= names(older.unsupported)
    assert "algorithm.aggregate" in names(skyrl({A + "loss_reduction": "prompt_mean"}).missing)


def test_penalties(skyrl):
    usual = skyrl({})
    assert usual.recipe["algorithm"]["reference_kl"] == {"kind": "k3", "coefficient": 0.001, "limit": 10.0}
    assert A + "use_kl_loss" in names(usual.unsupported)  # its own mean
    rewarded = {A + "use_kl_in_reward": True, A + "use_kl_loss": False, A + "kl_ctrl.type": "adaptive"}
    made = skyrl(rewarded | {A + "kl_estimator_type": "k1"}).recipe["algorithm"]
    assert made["reward_kl"]["adaptive"] == {"target": 0.1, "horizon": 10000} and "reference_kl" not in made
    assert skyrl({A + "use_entropy_loss": True}).recipe["algorithm"]["entropy_bonus"] == 0.01


def test_dynamic_sampling(skyrl):
    made = skyrl({A + "dynamic_sampling.type": "filter", A + "dynamic_sampling.max_sample_batches": 7})
    assert made.recipe["algorithm"]["selection"] == [{"kind": "drop_uniform_groups"}]
    assert made.recipe["algorithm"]["dynamic_sampling"]["max_num_gen_batches"] == 7
    replaced = skyrl({A + "dynamic_sampling.type": "replace"})
    assert A + "dynamic_sampling.type" in names(replaced.unsupported)


def test_asynchrony(skyrl):
    sizes = {"trainer.train_batch_size": 8, "trainer.policy_mini_batch_size": 8}
    own = {S + "max_staleness_steps": 2, S + "num_parallel_generation_workers": 16}
    made = skyrl(sizes | own | {S + "enabled": True}).recipe["runtime"]
    assert made == {"max_lag": 2, "max_concurrent_rollouts": 16}
    assert skyrl(sizes | own | {"trainer.placement.colocate_all": False}).recipe["runtime"]["max_lag"] == 2
    together = skyrl(sizes | own | {"trainer.placement.colocate_all": True})  # as the defaults of 0.4 have it
    assert together.recipe["runtime"]["max_lag"] == 0 and set(own) <= names(together.ignored)


@pytest.mark.parametrize("named", ["aime", "search", "text2sql", "mine", None])
def test_the_scorer_of_another_environment_is_to_fill_in(skyrl, named):
    done = skyrl({"environment.env_class": named, "data.train_data": ["rows/train.parquet"]})
    assert "environment.env_class" in why(done.missing)["reward.0"]
    column = "reward_model" if named == "aime" else "reward_spec"
    assert done.recipe["task"]["answer"] == f"{column}.ground_truth"


def test_gsm8k_in_a_file_of_another_name_is_scored_by_its_number(skyrl):
    done = skyrl({"data.train_data": ["rows.parquet"]})
    assert done.recipe["reward"] == [{"kind": "number"}] and done.missing == []


def test_files_of_several_data_sets_are_a_mix(skyrl):
    done = skyrl({"data.train_data": ["d/gsm8k/train.parquet", "d/search/train.parquet"]})
    task = done.recipe["task"]
    assert task["kind"] == "mix" and [source["name"] for source in task["tasks"]] == ["gsm8k", "search"]
    assert task["tasks"][0]["reward"] == [{"kind": "gsm8k"}] and "reward.0" in names(done.missing)


def test_turns_need_an_environment(skyrl):
    options = {"environment.env_class": "search", "generator.max_turns": 4, "generator.max_input_length": 4096}
    done = skyrl(options | {"generator.sampling_params.stop": ["</search>"]})
    assert done.recipe["episode"]["turns"] == 4 and done.recipe["episode"]["tokens"] == 5120
    assert done.recipe["sampling"]["stop"] == ["</search>"]
    assert "skyrl_gym" in why(done.missing)["environment.env_class"]


def test_a_split_of_the_hub_is_a_field(skyrl):
    done = skyrl({"data.train_data": ["org/rows:second"], "data.val_data": ["org/rows"]}).recipe
    assert (done["task"]["path"], done["task"]["split"]) == ("org/rows", "second")
    assert done["eval"]["task"]["split"] == "train"


def test_an_option_that_skyrl_lacks_is_unknown(skyrl):
    done = skyrl({A + "eps_clip_hgih": 0.3, "generator.rope_theta": 10000.0})
    assert "eps_clip_high" in why(done.unknown)[A + "eps_clip_hgih"]
    assert "generator.rope_theta" in names(done.unsupported)


def test_the_first_spellings_of_the_engine(skyrl):
    older = {"generator.backend": "sglang", "generator.num_inference_engines": 4}
    made = skyrl(older | {"generator.inference_engine_tensor_parallel_size": 2}).recipe["engine"]
    assert made["kind"] == "sglang" and made["serve"]["replicas"] == 4
    assert made["serve"]["arguments"] == ["--tp-size", "2"]


def test_defaults_of_skyrl_train_are_those_of_its_version(skyrl):
    files = {"data.val_data": ["v.parquet"], A + "policy_loss_type": "cispo"}
    new, old = skyrl(files), skyrl(files | {"generator.backend": "vllm", "trainer.micro_train_batch_size_per_gpu": 4})
    assert new.recipe["eval"]["sampling"]["temperature"] == 1 and old.recipe["eval"]["sampling"]["temperature"] == 0
    bounds = [done.recipe["algorithm"]["surrogate"] for done in (new, old)]
    assert [(b["epsilon_low"], b["epsilon_high"]) for b in bounds] == [(1.0, 4.0), (0.0, 5.0)]
    assert A + "loss_reduction" in names(old.unsupported) and A + "loss_reduction" not in names(new.unsupported)
    assert "trainer.micro_train_batch_size_per_gpu" in names(old.unsupported)


def test_an_option_of_another_loss_has_no_effect(skyrl):
    done = skyrl({A + "cispo.cispo_anchor": "rollout", A + "sapo.tau_pos": 2.0, A + "clip_ratio_c": 5.0})
    assert {A + "cispo.cispo_anchor", A + "sapo.tau_pos", A + "clip_ratio_c"} <= names(done.ignored)


def test_skyrls_sft_is_refused(tmp_path: Path, capsys):
    (tmp_path / "run.sh").write_text("uv run python -m skyrl.train.main_sft model.path=org/m num_steps=10\n")
    assert main(["peers", "convert", str(tmp_path / "run.sh")]) == 2
    assert "SkyRL's SFT" in capsys.readouterr().err
