"""TRL's SFT, DPO, KTO and reward models become recipes for SFT, DPO and reward models."""

import pytest

from proxima.config import ConfigError, resolve
from proxima.config.families import family_name
from proxima.core.preference.divergence_pair import Robust, Sigmoid
from proxima.core.preference.kto import Kto
from proxima.core.preference.likelihood import Sft
from proxima.model.lora import Lora
from proxima_peers.convert.conversion import convert, likely_peers
from proxima_peers.verify.record import Tracked
from proxima_peers.verify.trl_preference import dpo_spec

from .conftest import names

BASE = {"model_name_or_path": "m", "dataset_name": "org/rows", "num_processes": 2}
MARK = {
    "sft": {"completion_only_loss": True},
    "dpo": {"label_smoothing": 0.0},
    "kto": {"desirable_weight": 1.0},
    "reward": {"center_rewards_coefficient": 0.01},
}
COMMANDS = {"sft": "sft", "dpo": "dpo", "kto": "dpo", "reward": "reward"}
LR = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "reward": 1e-4}


def config_of(done):
    assert done.problems == ()
    return resolve(done.recipe, root=None).config


@pytest.mark.parametrize("kind", MARK)
def test_defaults_that_a_file_does_not_say(converted, kind):
    done = converted("trl", BASE | MARK[kind])
    config = config_of(done)
    train = config.train
    assert family_name(config) == COMMANDS[kind] and train.optimizer.lr == LR[kind]
    assert (train.examples_per_step, train.epochs, train.schedule, train.optimizer.weight_decay) == (16, 3, "linear", 0)
    assert config.model.max_length == 1024 and config.model.gradient_checkpointing and config.seed == 42
    assert config.data.over_length == ("truncate" if kind == "sft" else "skip")
    assert config.data.shuffle is (kind != "kto")
    assert ("max_length" in names(done.unsupported)) is (kind in ("dpo", "kto"))


@pytest.mark.parametrize("kind", MARK)
def test_what_every_trainer_has(converted, kind):
    options = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 8,
        "max_steps": 70,
        "learning_rate": 3e-5,
        "warmup_ratio": 0.1,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.3,
        "max_length": 300,
        "use_peft": True,
        "lora_r": 4,
        "lora_dropout": 0,
        "eval_strategy": "steps",
        "eval_steps": 20,
        "save_steps": 10,
        "save_total_limit": 2,
        "seed": 7,
        "report_to": "none",
    }
    done = converted("trl", BASE | MARK[kind] | options)
    config = config_of(done)
    train = config.train
    assert (train.examples_per_step, train.steps, train.warmup_ratio, train.max_grad_norm) == (64, 70, 0.1, 0.3)
    assert train.schedule == "cosine" and train.optimizer.lr == 3e-5 and config.seed == 7
    assert (
        config.model.lora == Lora(rank=4, alpha=32.0, targets=("q_proj", "v_proj")) and config.model.max_length == 300
    )
    assert (config.eval.every, config.eval.limit, config.eval.task.split) == (20, 0, "test")
    assert (config.checkpoint.every, config.checkpoint.keep_last) == (10, 2)
    assert names(done.unknown) == set() and names(done.unsupported) <= {"max_length"}


@pytest.mark.parametrize(
    ("options", "loss_on"),
    [({"assistant_only_loss": True}, "all_turns"), ({"completion_only_loss": True}, "completion")],
)
def test_which_tokens_sft_trains(converted, options, loss_on):
    done = converted("trl", BASE | options)
    assert config_of(done).sft.loss_on == loss_on and "sft.loss_on" not in names(done.missing)


def test_what_sft_has_no_equal_for(converted):
    options = {"completion_only_loss": False, "packing": True, "loss_type": "dft", "eos_token": "<e>"}
    options |= {"dataset_text_field": "body", "packing_strategy": "wrapped", "dataset_kwargs": {"a": 1}}
    done = converted("trl", BASE | options)
    assert set(options) - {"dataset_kwargs"} <= names(done.unsupported)
    assert "dataset_kwargs.a" in names(done.missing)
    undecided = converted("trl", BASE | {"packing": False, "loss_type": "chunked_nll"})
    assert "sft.loss_on" in names(undecided.missing) and not undecided.unsupported


def test_losses_of_pairs(converted):
    options = {"loss_type": ["sigmoid", "robust", "sft"], "loss_weights": [1.0, 0.5, 0.2], "beta": 0.3}
    options |= {"label_smoothing": 0.2, "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7}
    section = config_of(converted("trl", BASE | options)).preference
    alpha = {"divergence": "alpha", "alpha": 0.7}
    assert section.loss == (Sigmoid(0.3, **alpha), Robust(0.3, **alpha, label_smoothing=0.2), Sft())
    assert section.weights == (1.0, 0.5, 0.2) and section.reference == "start"


def test_numbers_of_pairs_that_no_loss_reads(converted):
    done = converted("trl", BASE | {"label_smoothing": 0.2, "discopop_tau": 0.1, "loss_weights": [1.0]})
    assert {"label_smoothing", "discopop_tau", "loss_weights"} <= names(done.ignored)  # TRL's sigmoid: T12
    assert config_of(done).preference.loss == (Sigmoid(0.1),)
    other = converted("trl", BASE | {"ld_alpha": 0.5, "use_weighting": True, "sync_ref_model": True, "rpo_alpha": 1.0})
    assert config_of(other).preference.ld_alpha == 0.5 and config_of(other).preference.on_policy_weights
    assert {"sync_ref_model", "rpo_alpha"} <= names(other.unsupported)
    assert "preference.loss.0" in names(converted("trl", BASE | MARK["dpo"] | {"loss_type": "simpo"}).missing)


@pytest.mark.parametrize("written", ["sigmoid", "hinge", "ipo", "robust", "nca_pair", "aot", "discopop"])
def test_the_loss_of_a_pair_is_the_one_that_golden_records_prove(converted, written):
    options = {"loss_type": written, "beta": 0.4, "label_smoothing": 0.1, "discopop_tau": 0.3}
    expected = dpo_spec(written, Tracked(options), smoothing=False)  # TRL's sigmoid has none: T12
    assert config_of(converted("trl", BASE | options)).preference.loss == (expected,)


def test_kto(converted):
    options = {"desirable_weight": 1.3, "undesirable_weight": 0.8, "beta": 0.2}
    assert config_of(converted("trl", BASE | options)).preference.loss == (Kto(0.2, 1.3, 0.8),)
    zero = config_of(converted("trl", BASE | options | {"loss_type": "apo_zero_unpaired"}))
    assert zero.preference.loss == (Kto(0.2, 1.3, 0.8, "zero"),)


def test_a_reward_model(converted):
    done = converted("trl", BASE | {"center_rewards_coefficient": 0.05})
    assert (config_of(done).reward_model.center, config_of(done).reward_model.head_std) == (0.05, 0.02)
    assert "reward_model.margin_column" in names(done.missing)


@pytest.mark.parametrize(("loss", "command"), [("dft", "sft"), (["ipo"], "dpo"), ("apo_zero_unpaired", "dpo")])
def test_a_loss_tells_the_training(converted, loss, command):
    assert family_name(config_of(converted("trl", BASE | {"loss_type": loss}))) == command


def test_a_file_of_grpo_stays_one(converted):
    done = converted("trl", BASE | {"num_generations": 8, "packing": True})
    assert family_name(config_of(done)) == "train" and "packing" in names(done.unknown)


def test_processes_and_parts_of_epochs_are_to_fill_in(converted):
    options = {"model_name_or_path": "m", "dataset_name": "rows.jsonl", "num_train_epochs": 0.5} | MARK["sft"]
    done = converted("trl", options)
    assert {"train.examples_per_step", "train.steps"} <= names(done.missing)
    assert done.recipe["task"] == {"kind": "jsonl", "path": "rows.jsonl", "messages": "messages"}


SCRIPTS = {
    "sft": ("a.sh", "trl sft --model_name_or_path m --dataset_name org/rows --learning_rate 1e-4"),
    "dpo": ("a.sh", "accelerate launch examples/dpo.py \\\n  --model_name_or_path m --dataset_name d --beta 0.2"),
    "kto": ("a.py", "from trl import KTOConfig, KTOTrainer\nKTOTrainer(model='m', args=KTOConfig(beta=0.2))"),
    "reward": ("a.py", "from trl import RewardConfig, RewardTrainer\nRewardTrainer('m', args=RewardConfig(seed=1))"),
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_scripts_tell_by_their_command_or_their_classes(tmp_path, kind):
    name, text = SCRIPTS[kind]
    (tmp_path / name).write_text(text)
    config = config_of(convert(tmp_path / name, "trl"))
    assert family_name(config) == COMMANDS[kind]
    if kind in ("dpo", "kto"):
        assert config.preference.loss[0].beta == 0.2


def test_a_file_that_could_be_any_of_them_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("model_name_or_path: m\nlearning_rate: 1e-5\nmax_length: 512\n")
    with pytest.raises(ConfigError, match="such a configuration of TRL"):
        convert(tmp_path / "a.yaml", "trl")


def test_an_option_of_another_training_is_unknown(converted):
    done = converted("trl", BASE | MARK["sft"] | {"steps_per_generation": 8, "learning_rates": 1})
    assert {"steps_per_generation", "learning_rates"} <= names(done.unknown)


def test_such_a_file_is_known_as_one_of_trl(tmp_path):
    (tmp_path / "a.sh").write_text(SCRIPTS["sft"][1])
    assert likely_peers(tmp_path / "a.sh") == ["trl"]
