"""packages/proxima-peers/docs/migration.md names options that the converters know, and fields that exist here."""

import re
from pathlib import Path

import pytest

from proxima_peers.convert import PEERS
from proxima_peers.convert.conversion import module_of
from proxima_peers.convert.draft import Draft
from proxima_peers.convert.known import option_rules, sort_out
from proxima_peers.convert.options import Options

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")
SHORT = {
    "verl": {
        "actor.": "actor_rollout_ref.actor.",
        "rollout.": "actor_rollout_ref.rollout.",
        "policy_loss.": "actor_rollout_ref.actor.policy_loss.",
        "correction.": "algorithm.rollout_correction.",
    }
}
PLAYED = {"orchestrator.train.source": [{"env": {"taskset": {"id": "a"}}}]}
PLAYED |= {"orchestrator.eval.source": [{"env": {"taskset": {"id": "a"}}}], "orchestrator.eval.sampling.temperature": 1}
CONTEXTS = {
    "verl": [
        {"algorithm.adv_estimator": "grpo", "reward_model.overlong_buffer.enable": True},
        {"algorithm.rollout_is_threshold": 2.0},
    ],
    "trl": [{"beta": 0.0}, {"loss_type": "sapo"}, {"loss_type": "vespo"}, {"use_vllm": True}, {"use_peft": True}],
    "areal": [
        {"actor.reward_norm.mean_level": "group"},
        {"actor.use_decoupled_loss": True},
        {"actor.rejection_sampling.upper": 5.0, "actor.use_decoupled_loss": True},
    ],
    "unirl": [{"algorithm._target_": f"x.{kind}"} for kind in ("CPPO", "DPPO", "DRPO", "GRPO")]
    + [{"backend.lora_cfg.rank": 8}],
    "skyrl": [{"trainer.algorithm.advantage_estimator": "gae", "trainer.algorithm.overlong_buffer_len": 1}],
    "prime_rl": [{"trainer.loss.type": kind} for kind in ("ipo", "default", "icepop")]
    + [{"trainer.model.lora.rank": 8, "trainer.scheduler.type": "linear"}, {"orchestrator.train.env": []}, PLAYED]
    + [{"orchestrator.algo.type": "echo", "orchestrator.env": [{"id": "a"}, {"id": "b"}]}],
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


def unknown(title, contexts, convert, rules, peer=""):
    """The options of a section that neither a conversion of these contexts nor the rules know."""
    names, asked = [full(peer, name) for name in named(title)], set()
    assert len(names) >= 15
    for context in contexts:
        o = Options(title, context, "file")
        convert(o)
        asked |= o.asked
    draft = Draft()
    draft.put("model.path", "x", "")
    sort_out(draft, Options(title, dict.fromkeys(names), "file", asked), rules(o))
    return [option.name for option in draft.unknown]


@pytest.mark.parametrize(
    ("peer", "title"),
    [
        ("verl", "verl"),
        ("trl", "TRL"),
        ("areal", "AReaL"),
        ("unirl", "UniRL"),
        ("prime_rl", "prime-rl"),
        ("skyrl", "SkyRL"),
    ],
)
def test_every_option_of_the_tables_is_known(peer, title):
    convert = module_of(PEERS[peer].online).convert
    assert unknown(title, CONTEXTS[peer], convert, lambda o: option_rules(peer), peer) == []


OF_TRL = [
    {"completion_only_loss": True},
    {"desirable_weight": 1.0},
    {"center_rewards_coefficient": 0.1},
    {"lmbda": 1.0},
    {"normalize_advantages": True, "use_vllm": True},
]


@pytest.mark.parametrize(
    ("peer", "title", "contexts"),
    [
        ("trl", "TRL", [{"loss_type": "discopop", "eval_strategy": "steps"}, *OF_TRL]),
        ("areal", "AReaL", [{"train_dataset.type": kind, "valid_dataset.path": "x"} for kind in ("sft", "rw", "dpo")]),
        ("verl", "verl", [{"model.partial_pretrain": "x", "data.prompt_key": "a"}, {"data.messages_key": "x"}]),
    ],
)
def test_every_option_of_the_trainings_without_rewards_is_known(peer, title, contexts):
    offline = module_of(PEERS[peer].offline)

    def convert(o):
        offline.convert_offline(o, offline.training_of(o))

    assert unknown(f"{title} without rewards", contexts, convert, offline.rules_of) == []


def test_the_four_policies_and_the_three_names_are_explained():
    for word in (
        "old_logp_source: rollout | replay",
        "use_decoupled_loss",
        "calculate_log_probs",
        "behavior μ",
        "reference π_ref",
    ):
        assert word in PAGE
