"""Dynamic sampling, length penalties and reward functions: what their options become, to the number."""

import math
from pathlib import Path

import pytest
import yaml

from proxima.config import resolve
from proxima.reward.length import Overlong
from proxima.reward.math.symbolic import Math
from proxima.reward.regex import Format
from proxima.reward.repetition import Repetition
from proxima_peers.convert.conversion import convert
from proxima_peers.convert.read_python import from_python

from .conftest import listed

F = "algorithm.filter_groups."
VERL = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 8, F + "enable": True, F + "metric": "acc"}
AREAL = {"actor.kl_ctl": 0.0, "actor.reward_norm.mean_level": "group", "actor.reward_norm.std_level": "group"}
PENALTY = {"actor.overlong_reward_penalty": True, "actor.overlong_tokens": 40, "actor.overlong_penalty_factor": 0.5}


def rewards(done):
    return resolve(done.recipe).config.reward


# --- verl -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("generated", "trained"), [(29, 7), (1536, 512), (100, 30), (1000, 999), (123, 7), (7, 7)])
def test_as_many_prompts_are_generated_as_in_verl(specs, generated, trained):
    spec = specs("verl", VERL | {"data.gen_batch_size": generated, "data.train_batch_size": trained}).dynamic_sampling
    assert math.ceil(spec.oversample * trained) == generated


@pytest.mark.parametrize("prefix", ["reward_model.overlong_buffer.", "reward.reward_kwargs.overlong_buffer_cfg."])
@pytest.mark.parametrize(("buffer", "factor"), [(90, 0.5), (100, 2.0)])
def test_verls_overlong_penalty(converted, prefix, buffer, factor):
    options = {"enable": True, "len": buffer, "penalty_factor": factor}
    options = {prefix + name: value for name, value in options.items()} | {"data.max_response_length": 100}
    (_, reward) = rewards(converted("verl", VERL | options))
    assert reward == Overlong(max_tokens=100, buffer_tokens=buffer, factor=factor)


@pytest.mark.parametrize(("level", "kind"), [("True", "token_mean"), ("False", "sequence_mean_token_mean")])
def test_the_first_dapo_scripts(tmp_path, level, kind):
    """Names of the first months, and paths that only the machine knows: asked for, not refused."""
    text = (Path(__file__).parent / "scripts" / "first_dapo.sh").read_text()
    (tmp_path / "run.sh").write_text(text.replace("LEVEL", level))
    done = convert(tmp_path / "run.sh", "verl")
    assert done.recipe["algorithm"]["aggregate"] == {"kind": kind}
    assert done.recipe["reward"][1] == {"kind": "overlong", "max_tokens": 100, "buffer_tokens": 20, "factor": 1.0}
    assert (done.recipe["train"]["prompts_per_step"], done.recipe["train"]["updates_per_step"]) == (24, 3)
    assert {"task", "launch"} <= listed(done)["missing"]  # recipe.dapo has defaults of its own
    assert done.recipe["model"]["path"] == "~/verl/models/Qwen2.5-32B"  # the home folder, whichever it is
    assert listed(done)["unknown"] == set()


def test_a_place_that_only_a_run_knows_is_asked_for(converted):
    done = converted("areal", AREAL | {"actor.path": "${oc.env:M}", "train_dataset.path": "${oc.env:D}\n\x00# end: {"})
    assert {"model.path", "task"} <= listed(done)["missing"]
    assert yaml.safe_load(done.text) == done.recipe


# --- AReaL ------------------------------------------------------------------------------------------------------------


def test_areals_overlong_penalty(converted):
    options = AREAL | PENALTY | {"gconfig.max_new_tokens": 120, "actor.max_new_tokens": 100}
    assert rewards(converted("areal", options))[1] == Overlong(max_tokens=100, buffer_tokens=40, factor=0.5)


# --- TRL --------------------------------------------------------------------------------------------------------------


def test_trls_reward_functions(converted):
    names = ["accuracy_reward", "think_format_reward", "get_soft_overlong_punishment"]
    done = converted("trl", {"reward_funcs": names, "reward_weights": [1.0, 0.25, 0.5]})
    result = rewards(done)
    assert [(type(entry), entry.weight) for entry in result] == [(Math, 1.0), (Format, 0.25), (Overlong, 0.5)]
    # what `trl grpo` calls by that name
    assert result[2] == Overlong(max_tokens=1280, buffer_tokens=256, factor=1.0, weight=0.5)
    assert listed(done)["missing"] == {"model.path", "task", "train.steps", "train.prompts_per_step"}
    assert not {"reward_funcs", "reward_weights"} & listed(done)["unsupported"]


def test_open_r1s_reward_functions(converted):
    names = ["accuracy", "format", "repetition_penalty", "soft_overlong_punishment", "cosine"]
    options = {"repetition_n_grams": 2, "repetition_max_penalty": -0.5}
    options |= {"max_completion_len": 100, "soft_punish_cache": 20}
    done = converted("trl", {"reward_funcs": names} | options)
    math_, form, repetition, overlong, cosine = rewards(done)
    assert isinstance(math_, Math) and repetition == Repetition(n=2, unit="words", max_penalty=0.5)
    assert overlong == Overlong(max_tokens=100, buffer_tokens=20, factor=1.0)
    assert isinstance(form, Format) and isinstance(cosine, Math) and cosine.name == "cosine_4"
    assert [option.why for option in done.missing if option.name == "reward.4"] == [
        "cosine: name it as {kind: function, path: rewards.py:cosine}, in a separate file; `math` is used instead"
    ]


@pytest.mark.parametrize(
    ("pattern_of", "text", "fits"),
    [
        ("think_format_reward", "<think>\nso\n</think>\nanswer", True),
        ("think_format_reward", "<think>so<think>so</think>answer", False),
        ("think_format_reward", " <think>so</think>", False),
        ("format", "<think>\nso\n</think>\n<answer>\n4\n</answer>", True),
        ("format", "<think>\nso\n</think>\n<answer>\n4\n</answer>\nmore", True),  # their $ is the end of any line
        ("format", "<think>\nso\n</think>\n<answer>\n4\n</answer> more", False),
        ("format", "<think>so</think>\n<answer>4</answer>", False),
    ],
)
def test_shapes_are_theirs(converted, pattern_of, text, fits):
    from proxima.reward.workers.graders import grade_format

    (form,) = (
        reward
        for reward in rewards(converted("trl", {"reward_funcs": [pattern_of, "accuracy_reward"]}))
        if isinstance(reward, Format)
    )
    assert grade_format(pattern=form.pattern, text=text)["value"] == fits


SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward, get_repetition_penalty_reward, get_soft_overlong_punishment
from my_lab import think_format_reward
LONGEST = 4 * 1024
def brevity(completions, **kwargs): ...
funcs = [
    accuracy_reward,
    get_soft_overlong_punishment(max_completion_len=LONGEST, soft_punish_cache=LONGEST // 8),
    get_repetition_penalty_reward(ngram_size=2, max_penalty=-0.5),
    get_soft_overlong_punishment(LONGEST, 0),
    get_soft_overlong_punishment(**more),
    think_format_reward,
    brevity,
]
trainer = GRPOTrainer(model="m", args=GRPOConfig(reward_weights=[1.0, 0.5, 0.1, 1, 1, 0.2, 0.3]), reward_funcs=funcs)
"""


def test_reward_functions_of_a_script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = convert(tmp_path / "train.py", "trl")
    assert done.recipe["reward"] == [
        {"kind": "math"},
        {"kind": "overlong", "max_tokens": 4096, "buffer_tokens": 512, "weight": 0.5},
        {"kind": "repetition", "n": 2, "unit": "tokens", "max_penalty": 0.5, "weight": 0.1},
        {"kind": "math", "name": "get_soft_overlong_punishment_3"},
        {"kind": "math", "name": "get_soft_overlong_punishment_4"},
        {"kind": "math", "name": "think_format_reward_5", "weight": 0.2},
        {"kind": "math", "name": "brevity_6", "weight": 0.3},
    ]
    assert [option.why.partition(":")[0] for option in done.missing if option.name.startswith("reward.")] == [
        "trl.rewards.get_soft_overlong_punishment(4096, 0)",
        "trl.rewards.get_soft_overlong_punishment(**more)",
        "my_lab.think_format_reward",  # another's of the same name is another function
        "__main__.brevity",
    ]


def test_a_function_nobody_knows_has_a_stand_in_with_its_weight(converted):
    done = converted(
        "trl",
        {"reward_funcs": ["get_soft_overlong_punishment", "my_lab.check", "near"], "reward_weights": [0.5, 2.0, 1]},
    )
    assert done.recipe["reward"] == [
        {"kind": "overlong", "max_tokens": 1280, "buffer_tokens": 256, "weight": 0.5},
        {"kind": "function", "path": "my_lab:check", "weight": 2.0},
        {"kind": "math", "name": "near_2"},
    ]
    assert "reward.2" in listed(done)["missing"] and "reward.1" not in listed(done)["missing"]


def test_no_reward_is_added_to_those_of_the_file(converted):
    done = converted("trl", {"reward_funcs": ["think_format_reward"], "num_generations": 8})
    assert [entry["kind"] for entry in done.recipe["reward"]] == ["format"]


def test_options_of_a_function_that_is_not_named(converted):
    done = converted(
        "trl", {"reward_funcs": ["accuracy"], "soft_punish_cache": 20, "reward_model_name_or_path": "org/rm"}
    )
    assert "soft_punish_cache" in listed(done)["ignored"]
    assert done.recipe["reward"] == [{"kind": "model", "path": "org/rm"}, {"kind": "math"}]  # in TRL's order


def test_weights_that_are_too_few(converted):
    done = converted("trl", {"reward_funcs": ["accuracy_reward", "think_format_reward"], "reward_weights": [0.5]})
    (why,) = (option.why for option in done.unsupported if option.name == "reward_weights")
    assert "1 for 2 rewards" in why and len(done.recipe["reward"]) == 2


@pytest.mark.parametrize("weights", [["1.0"], [True], [None], [[1.0]]])
def test_weights_that_are_no_numbers(converted, weights):
    done = converted("trl", {"reward_funcs": ["accuracy_reward"], "reward_weights": weights})
    assert "reward_weights" in listed(done)["missing"] and done.recipe["reward"] == [{"kind": "math"}]


HOSTILE = [
    "",
    "(",
    "-" * 100_000 + "1",
    "f(" * 500 + ")" * 500,
    "__import__('os').system('false')()",
    "a\nb",
    "get_soft_overlong_punishment(True, 1)",
    "get_soft_overlong_punishment(10**9, -3)",
    "get_repetition_penalty_reward(3, 0.5)",
    "get_repetition_penalty_reward(n=3)",
    None,
    3,
    {},
    [],
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("listed_", [True, False])
def test_whatever_is_written_is_listed_and_never_run(converted, text, listed_):
    done = converted("trl", {"beta": 0.0, "reward_funcs": [text, "accuracy_reward"] if listed_ else text})
    assert any(kind["kind"] == "math" for kind in done.recipe["reward"])
    if listed_ or text not in ("", None, [], {}):
        assert "reward.0" in listed(done)["missing"]


def test_functions_of_a_call_are_read_not_run():
    result = from_python("GRPOTrainer(args=GRPOConfig(beta=0), reward_funcs=[f(1 + 1), g.h, lambda c: 0])")
    assert result["reward_funcs"] == ["f(2)", "g.h", "lambda c: 0"]
