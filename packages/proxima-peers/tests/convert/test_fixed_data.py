"""SFT, reward models and DPO of AReaL, and verl's SFT, become recipes of the commands for fixed data sets."""

import re

import pytest

from proxima.config import ConfigError, resolve
from proxima.config.families import family_name
from proxima.core.preference.divergence_pair import Ipo, Sigmoid
from proxima.model.lora import Lora
from proxima_peers.convert.conversion import likely_peers

from .conftest import names


def config_of(done):
    assert done.problems == ()
    return resolve(done.recipe, root=None).config


def areal(kind, prefix="actor.", **more):
    """A file of options, dots written as `__`."""
    trained = {"path": "org/model", "dtype": "bfloat16", "mb_spec.max_tokens_per_mb": 5000, "optimizer.type": "adam"}
    trained |= {"optimizer.lr": 3e-5, "optimizer.beta2": 0.97, "optimizer.lr_scheduler_type": "cosine"}
    trained |= {"optimizer.warmup_steps_proportion": 0.2, "optimizer.gradient_clipping": 2.0, "backend": "fsdp"}
    options = {prefix + name: value for name, value in trained.items()}
    options |= {"train_dataset.path": "org/rows", "train_dataset.type": kind, "train_dataset.batch_size": 32}
    options |= {"tokenizer_path": "org/model", "seed": 9, "cluster.n_nodes": 1, "saver.freq_steps": 40}
    return options | {name.replace("__", "."): value for name, value in more.items()}


@pytest.mark.parametrize(
    ("kind", "command", "more"),
    [("sft", "sft", {}), ("rw", "reward", {"actor__is_critic": True}), ("dpo", "dpo", {"beta": 0.3})],
)
def test_a_training_of_areal(converted, kind, command, more):
    done = converted("areal", areal(kind, **more))
    config = config_of(done)
    train = config.train
    assert family_name(config) == command and config.seed == 9 and config.model.path == "org/model"
    assert (train.examples_per_step, train.epochs, train.warmup_ratio, train.max_grad_norm) == (32, 1, 0.2, 2.0)
    assert (train.optimizer.lr, train.optimizer.beta2, train.optimizer.weight_decay) == (3e-5, 0.97, 0.01)
    assert (train.tokens_per_micro_batch, train.schedule, config.checkpoint.every) == (5000, "cosine", 40)
    assert config.task.messages == ("messages" if kind == "sft" else "chosen")
    assert not done.unsupported and not done.unknown and names(done.missing) == {"task"}


def test_the_first_spelling_of_areals_sft(converted):
    """`model`, which is `actor` since 2026; the rules of the actor hold for it."""
    more = {"model__init_from_scratch": False, "model__use_lora": True, "model__lora_rank": 4, "total_train_epochs": 3}
    done = converted("areal", areal("sft", "model.", **more, train_dataset__max_length=300))
    config = config_of(done)
    assert config.model.lora == Lora(rank=4, alpha=16.0) and config.train.epochs == 3
    assert (config.model.max_length, config.data.over_length) == (300, "skip")
    assert {"tokenizer_path", "model.init_from_scratch", "model.backend"} <= names(done.ignored)
    changed = converted("areal", areal("sft", "model.", model__init_from_scratch=True, tokenizer_path="other"))
    assert "model.init_from_scratch" in names(changed.unsupported) and "tokenizer_path" in names(changed.missing)


def test_areals_preference_losses_and_held_out_rows(converted):
    held_out = {"valid_dataset__path": "org/rows", "valid_dataset__type": "dpo", "valid_dataset__max_length": 90}
    more = {"loss_type": "ipo", "ref__path": "org/other", "train_dataset__max_length": 80, "total_train_steps": 70}
    done = converted("areal", areal("dpo", **held_out, **more, evaluator__freq_steps=5, evaluator__freq_secs=60))
    config = config_of(done)
    assert config.preference.loss == (Ipo(0.1),) and config.train.steps == 70
    assert (config.eval.every, config.eval.limit, config.eval.before, config.eval.task.split) == (5, 0, False, "test")
    assert names(done.unsupported) == {"ref.path", "valid_dataset.max_length"}
    assert {"eval.every", "preference.loss.0"} <= names(done.missing)
    assert config_of(converted("areal", areal("dpo", beta=0.2))).preference.loss == (Sigmoid(0.2),)


def test_gsm8k_keeps_its_solutions(converted):
    done = converted("areal", areal("sft", train_dataset__path="openai/gsm8k"))
    config = config_of(done)
    assert config.task.split == "train" and config.sft.completion.startswith("{solution}")
    assert names(done.unsupported) == {"train_dataset.path"}  # the chat template
    done = converted("verl", verl(**{"data.train_files": "~/gsm8k/train.parquet"}))
    assert config_of(done).sft.completion.startswith("{solution}")


def verl(**more):
    """The FSDP trainer up to 0.5."""
    options = {"model.partial_pretrain": "org/model", "data.train_files": "rows.parquet", "data.truncation": "right"}
    options |= {"data.prompt_key": "extra_info", "data.prompt_dict_keys": ["question"], "data.response_key": "answer"}
    options |= {"data.train_batch_size": 24, "data.max_length": 700, "optim.lr": 4e-5, "trainer.total_epochs": 2}
    return options | more


def test_verls_sft_up_to_0_5(converted):
    more = {
        "data.micro_batch_size_per_gpu": 2,
        "model.lora_rank": 8,
        "trainer.nnodes": 1,
        "trainer.logger": ["console"],
    }
    done = converted("verl", verl(**more))
    config = config_of(done)
    assert (config.task.question, config.task.answer, config.sft.loss_on) == (
        "extra_info.question",
        "answer",
        "completion",
    )
    train = config.train
    assert (train.examples_per_step, train.epochs, train.schedule, train.warmup_ratio) == (24, 2, "cosine", 0.1)
    assert (train.optimizer.lr, train.optimizer.beta2, train.optimizer.weight_decay) == (4e-5, 0.95, 0.01)
    assert (config.model.max_length, config.data.over_length, config.model.lora.rank) == (700, "truncate", 8)
    assert names(done.unsupported) == {"data.micro_batch_size_per_gpu"} and not done.unknown and not done.missing


def test_verls_sft_of_its_engines(converted):
    options = {"model.path": "org/model", "data.messages_key": "chat", "data.train_files": "rows.parquet"}
    options |= {"data.use_dynamic_bsz": True, "data.max_token_len_per_gpu": 900, "data.micro_batch_size_per_gpu": 4}
    options |= {"optim.lr_warmup_steps_ratio": 0.3, "optim.warmup_style": "cosine", "optim.min_lr_ratio": 0.2}
    options |= {
        "data.val_files": "test.parquet",
        "trainer.test_freq": 7,
        "trainer.save_freq": 11,
        "data.truncation": "left",
    }
    options |= {"engine.strategy": "fsdp", "data.pad_mode": "no_padding", "trainer.total_training_steps": 60}
    done = converted("verl", options)
    config = config_of(done)
    assert (config.task.messages, config.sft.loss_on, config.train.tokens_per_micro_batch) == ("chat", "all_turns", 900)
    assert (config.train.steps, config.train.warmup_ratio, config.train.final_lr_ratio) == (60, 0.3, 0.2)
    assert (config.eval.every, config.eval.task.path, config.checkpoint.every) == (7, "test.parquet", 11)
    assert names(done.unsupported) == {"data.truncation"} and not done.unknown and not done.missing


@pytest.mark.parametrize(
    ("peer", "options"),
    [
        ("areal", areal("rl")),
        ("areal", areal("sft") | {"gconfig.n_samples": 2}),
        ("verl", verl() | {"algorithm.adv_estimator": "grpo"}),
    ],
)
def test_what_is_another_training_stays_one(converted, peer, options):
    try:
        assert family_name(resolve(converted(peer, options).recipe, root=None).config) == "train"
    except ConfigError as error:
        assert "is not such a configuration" in str(error)


def test_the_peer_is_found_by_the_options(converted, tmp_path):
    for peer, options in (("areal", areal("dpo")), ("verl", verl())):
        converted(peer, options)
        assert likely_peers(tmp_path / "options.json") == [peer]


@pytest.mark.parametrize(("peer", "options"), [("areal", areal("rw", beta=0.1)), ("verl", verl(made__up=1))])
def test_every_option_is_reported(converted, peer, options, tmp_path):
    done = converted(peer, options)
    messages = {word.strip(".,:;") for word in re.findall(r"[^\s()'=]+", done.text.replace("#", " "))}
    assert set(options) - messages == set()
