"""Dynamic sampling and reward functions: what no single case of options.yaml shows."""

import math
from pathlib import Path

import pytest

from proxima.config.resolution import resolve
from proxima.reward.text import Format
from proxima_peers.convert.conversion import convert
from proxima_peers.convert.read_python import from_python

from .conftest import listed

F = "algorithm.filter_groups."
VERL = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 8, F + "enable": True, F + "metric": "acc"}


def rewards(done):
    return resolve(done.filled).config.reward


@pytest.mark.parametrize(("generated", "trained"), [(29, 7), (1536, 512), (100, 30), (1000, 999), (123, 7), (7, 7)])
def test_as_many_prompts_are_generated_as_in_verl(specs, generated, trained):
    spec = specs("verl", VERL | {"data.gen_batch_size": generated, "data.train_batch_size": trained}).dynamic_sampling
    assert math.ceil(spec.oversample * trained) == generated


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
    assert any(kind["kind"] == "math" for kind in done.filled["reward"])
    if listed_ or text not in ("", None, [], {}):
        assert "reward.0" in listed(done)["missing"]


def test_functions_of_a_call_are_read_not_run():
    result = from_python("GRPOTrainer(args=GRPOConfig(beta=0), reward_funcs=[f(1 + 1), g.h, lambda c: 0])")
    assert result["reward_funcs"] == ["f(2)", "g.h", "lambda c: 0"]
