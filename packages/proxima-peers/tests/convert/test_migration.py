"""docs/migration.md names options that the converters know, and fields that exist here."""

import re
from pathlib import Path

import pytest

from proxima_peers.convert import PEERS
from proxima_peers.convert.conversion import module_of
from proxima_peers.convert.draft import Draft
from proxima_peers.convert.known import option_rules, sort_out
from proxima_peers.convert.options import Options
from proxima_peers.convert.trl_offline import convert_offline

PAGE = (Path(__file__).parents[4] / "docs" / "migration.md").read_text(encoding="utf-8")
SHORT = {
    "verl": {
        "actor.": "actor_rollout_ref.actor.",
        "rollout.": "actor_rollout_ref.rollout.",
        "policy_loss.": "actor_rollout_ref.actor.policy_loss.",
        "correction.": "algorithm.rollout_correction.",
    }
}
CONTEXTS = {
    "verl": [
        {"algorithm.adv_estimator": "grpo", "reward_model.overlong_buffer.enable": True},
        {"algorithm.rollout_is_threshold": 2.0},
    ],
    "trl": [{"beta": 0.0}, {"loss_type": "sapo"}, {"loss_type": "vespo"}, {"use_vllm": True}, {"use_peft": True}],
    "areal": [
        {"actor.reward_norm.mean_level": "group"},
        {"actor.use_decoupled_loss": True},
        {"actor.rejection_sampling.upper": 5.0},
    ],
    "unirl": [{"algorithm._target_": f"x.{kind}"} for kind in ("CPPO", "DPPO", "DRPO", "GRPO")]
    + [{"backend.lora_cfg.rank": 8}],
    "prime_rl": [{"trainer.loss.type": kind} for kind in ("ipo", "default", "icepop")]
    + [{"trainer.model.lora.rank": 8, "trainer.scheduler.type": "linear"}],
}


def named(title):
    """The options in the first column of the tables of a section."""
    section = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    return sorted({name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)} - {"GRPOTrainer", "model"})


def full(peer, name):
    for short, prefix in SHORT.get(peer, {}).items():
        if name.startswith(short):
            return prefix + name.removeprefix(short)
    return name


def unknown(o, rules):
    draft = Draft()
    draft.put("model.path", "x", "")
    sort_out(draft, o, rules)
    return [option.name for option in draft.unknown]


@pytest.mark.parametrize(
    ("peer", "title"),
    [("verl", "verl"), ("trl", "TRL"), ("areal", "AReaL"), ("unirl", "UniRL"), ("prime_rl", "prime-rl")],
)
def test_every_option_of_the_tables_is_known(peer, title):
    names = [full(peer, name) for name in named(title)]
    assert len(names) >= 15
    known_names = set()
    for context in CONTEXTS[peer]:
        if "actor.rejection_sampling.upper" in context:
            context = {**context, "actor.use_decoupled_loss": True}
        o = Options(title, context, "file")
        module_of(PEERS[peer].online).convert(o)
        known_names |= o.asked
    rest = Options(title, dict.fromkeys(names), "file", known_names)
    assert unknown(rest, option_rules(peer)) == []


def test_every_option_of_the_trainings_without_rewards_is_known():
    names = named("TRL without rewards")
    assert len(names) >= 15
    known_names = set()
    for command in ("sft", "dpo", "kto", "reward", "gkd"):
        o = Options("TRL", {"loss_type": "discopop", "eval_strategy": "steps"} if command == "dpo" else {}, "file")
        convert_offline(o, command)
        known_names |= o.asked
    rest = Options("TRL", dict.fromkeys(names), "file", known_names)
    assert unknown(rest, option_rules("trl_offline") | option_rules("trl")) == []


@pytest.mark.parametrize(
    ("peer", "title", "contexts"),
    [
        ("areal", "AReaL", [{"train_dataset.type": kind, "valid_dataset.path": "x"} for kind in ("sft", "rw", "dpo")]),
        ("verl", "verl", [{"model.partial_pretrain": "x", "data.prompt_key": "a"}, {"data.messages_key": "x"}]),
    ],
)
def test_every_option_of_further_trainings_without_rewards_is_known(peer, title, contexts):
    names, known_names = named(f"{title} without rewards"), set()
    assert len(names) >= 15
    offline = module_of(PEERS[peer].offline)
    for context in contexts:
        o = Options(title, context, "file")
        offline.convert_offline(o, offline.training_of(o))
        known_names |= o.asked
    rest = Options(title, dict.fromkeys(names), "file", known_names)
    assert unknown(rest, offline.rules_of(o)) == []


def test_the_four_policies_and_the_three_names_are_explained():
    for word in (
        "old_logp_source: rollout | replay",
        "use_decoupled_loss",
        "calculate_log_probs",
        "behavior μ",
        "reference π_ref",
    ):
        assert word in PAGE
