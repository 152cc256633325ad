"""The tables of options without an equivalent, and what they say of a file: nothing is swallowed."""

import fnmatch
import re
from pathlib import Path

import pytest
import yaml

from proxima.config import resolve
from proxima.core.selection.partial_selection import Prune
from proxima.core.surrogate.cppo import Cppo
from proxima_peers.convert import PEERS
from proxima_peers.convert.conversion import convert
from proxima_peers.convert.known import option_rules
from proxima_peers.convert.read import read

from .conftest import EXAMPLES, names

FILES = [
    ("verl_dapo.yaml", "verl"),
    ("verl_cppo.sh", "verl"),
    ("verl_tools.yaml", "verl"),
    ("trl_tools.py", "trl"),
    ("trl_grpo.py", "trl"),
    ("trl_prune.sh", "trl"),
    ("trl_prune.yaml", "trl"),
    ("areal_async.yaml", "areal"),
    ("unirl_cppo.yaml", "unirl"),
    ("prime_rl_band.toml", "prime_rl"),
]
TABLES = {peer: EXAMPLES.parents[1] / "src/proxima_peers/convert/options" / f"{peer}.yaml" for peer in PEERS}
A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


@pytest.mark.parametrize(("name", "peer"), FILES)
def test_every_option_that_a_file_sets_is_reported_in_the_text(name, peer):
    """As the origin of a value, or in a list: translated, to fill in, not supported, unknown, read, without effect."""
    done = convert(EXAMPLES / name, peer)
    messages = {word.strip(".,:;") for word in re.findall(r"[^\s()'=]+", done.text.replace("#", " "))}
    given = {option for option, value in read(EXAMPLES / name).items() if value is not None}
    assert len(given) > 10 and given - messages == set()
    assert yaml.safe_load(done.text) == done.recipe and resolve(done.recipe)


@pytest.mark.parametrize("peer", PEERS)
def test_a_table_names_each_option_once_in_a_section(peer):
    class Loader(yaml.SafeLoader):
        """Refuses a key that is written twice, which YAML would swallow."""

    def mapping(loader, node, deep=False):
        keys = [loader.construct_object(key, deep) for key, _ in node.value]
        assert len(keys) == len(set(keys)), (node.start_mark, sorted(keys))
        return yaml.SafeLoader.construct_mapping(loader, node, deep)

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    assert set(yaml.load(TABLES[peer].read_text(), Loader)) <= {
        "training",
        "no effect",
        "changes",
        "waits",
        "part of",
        "copies",
        "to fill in",
    }


HARMLESS = (
    "profiler",
    "_target_",
    "transfer_queue",
    "npu_profile",
    "nsight_options",
    "actor.profile.",
    "critic.profile.",
    "name_remap.",
)


@pytest.mark.parametrize("peer", PEERS)
def test_no_pattern_without_effect_can_hide_a_misspelling(peer):
    table = option_rules(peer)
    assert len(table) > 60
    patterns = [name for name, rule in table.items() if rule.effect == "no effect" and "*" in name]
    assert [name for name in patterns if not any(part in name for part in HARMLESS)] == []


TABLE = yaml.load(Path(__file__).with_name("changing.yaml").read_text(), yaml.CSafeLoader)
BASE = TABLE["base"]


@pytest.mark.parametrize(
    ("peer", "option", "value"),
    [(peer, *pair) for peer, options in TABLE["changing"].items() for pair in options.items()],
)
def test_what_changes_numbers_is_never_without_effect(converted, peer, option, value):
    done = converted(peer, BASE[peer] | {option: value})
    near = {name for name in names(done.ignored) if fnmatch.fnmatchcase(name, f"{option}*")}
    assert near == set()
    listed = names(done.unsupported) | names(done.missing)
    assert any(name.startswith(option) for name in listed) or f"from {option}" in done.text


def test_verl_cppo_from_a_script_with_arrays_and_branches(example):
    done, resolved = example("verl_cppo.sh", "verl")
    config = resolved.config
    assert config.algorithm.surrogate == Cppo(0.15, 0.7, 0.03)
    assert config.algorithm.proximal == "behavior"
    assert done.recipe["task"]["path"] == ["~/data/dapo/train.parquet", "~/data/gsm8k/train.parquet"]  # not GSM8K alone
    assert (config.task.messages, config.task.answer) == ("prompt", "reward_model.ground_truth")
    assert (config.eval.samples, config.eval.sampling.temperature, config.eval.before) == (4, 0.6, False)
    assert (config.eval.every, config.train.tokens_per_micro_batch, config.train.warmup_ratio) == (10, 18432, 0.05)
    fill = {option.name: option.why for option in done.missing}
    assert "RATE is 1e-6 or 5e-7" in fill["train.optimizer.lr"] and config.train.optimizer.lr == 1e-6  # verl's default
    assert "prompts is 64 or 32" in fill["train.prompts_per_step"]
    assert A + "entropy_coeff" in fill and "0.01, by a branch" in fill[A + "entropy_coeff"]
    assert names(done.unknown) == {A + "megatron.param_ofload"}
    assert {
        A + "policy_loss.cppo.cppo_delta_b_q",
        A + "clip_ratio_c",
        A + "megatron.override_transformer_config.moe_router_dtype",
        R + "do_sample",
        "data.image_key",
    } <= names(done.unsupported)
    assert R + "engine_kwargs.vllm.logits_processors" in names(done.missing)


def test_pruning_from_its_own_launch_script(example):
    done, resolved = example("trl_prune.sh", "trl")
    config = resolved.config
    assert config.algorithm.selection == (Prune(0.5, "largest", "group", "drop", allocate=True),)
    train = config.train  # 16 completions * 3 processes * 4 steps / 16 completions a prompt
    assert (train.prompts_per_step, train.completions_per_prompt, train.updates_per_step) == (12, 16, 1)
    assert (train.epochs_per_step, train.warmup_ratio, train.warmup_steps, train.final_lr_ratio) == (2, 0.1, 0, 0.1)
    assert (config.task.path, config.task.subset, config.task.question) == ("my-lab/problems", "default", "problem")
    assert config.data.system == "Think, then answer in $\\boxed{{ANSWER}}$."
    assert (config.eval.task.split, config.eval.every, config.eval.samples) == ("test", 40, 16)
    assert config.model.dtype == "bfloat16"
    assert {"train.steps", "reward.1", "config_file", "chat_template"} == names(done.missing)
    assert "model_init_kwargs.rope_scaling" in names(done.unsupported)
    assert dict(config.data.template_arguments) == {"enable_thinking": False}
    assert "lr_scheduler_kwargs.num_cycles" in names(done.unsupported)
    assert names(done.unknown) == {"gradient_checkpointing_kwargs.use_reentrent"}
