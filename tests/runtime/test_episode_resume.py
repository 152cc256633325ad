"""Runs whose completions are episodes, killed and resumed, in every mode that decides what a step trains on: those that
depend on no moment are the unbroken run to the bit; of the others each prompt is consumed once."""

from contextlib import suppress

import pytest

from tests.runtime.episode_world import episode_recipe, go, whole
from tests.runtime.interruptions import PLACES, Died, die_at
from tests.runtime.test_async_run import assert_whole
from tests.runtime.tiny_run import assert_same

SYNCHRONOUS = {
    "an engine of its own": {"engine__kind": "local_process", "engine__threads": 1},
    "dynamic sampling": {
        "algorithm": {
            "preset": "grpo",
            "selection": [{"kind": "drop_uniform_groups", "metric": "reward"}],
            "dynamic_sampling": {"max_num_gen_batches": 8, "oversample": 1.5},
        }
    },
    "pruning": {"algorithm": {"preset": "grpo", "selection": [{"kind": "prune", "rate": 0.5}]}},
    "returns of turns": {"algorithm": {"preset": "grpo", "advantage": {"kind": "turn_returns"}}},
    "states in common": {"algorithm": {"preset": "grpo", "advantage": {"kind": "gigpo"}}},
    "a critic": {"algorithm": {"preset": "ppo", "advantage": {"kind": "gae"}}, "critic": {"kind": "head"}},
}


@pytest.mark.parametrize("mode", SYNCHRONOUS)
def test_a_resumed_run_is_the_unbroken_one(mode, tiny_model, tmp_path, warm_processes):
    tree = episode_recipe(tiny_model("llama"), **SYNCHRONOUS[mode])
    assert go(tmp_path / "unbroken", tree).status == "done"
    with pytest.raises(Died):
        go(tmp_path / "run", tree, observer=die_at(*PLACES["while training"]))
    with suppress(Died):
        go(tmp_path / "run", tree, resume=True, observer=die_at("step", lambda record, sample: record["step"] == 2))
    assert go(tmp_path / "run", tree, resume=True).status == "done"
    assert_same(whole(tmp_path / "run"), whole(tmp_path / "unbroken"))


NEXT = {"preset": "grpo", "proximal": "next", "correction": [{"kind": "importance", "towards": "next"}]}
ASYNCHRONOUS = {
    "wait": {},
    "train": {"runtime__over_age": "train"},
    "drop": {"runtime__over_age": "drop"},
    "the next policy": {"algorithm": NEXT},
}


@pytest.mark.parametrize("mode", ASYNCHRONOUS)
def test_a_resumed_asynchronous_run_consumes_each_prompt_once(mode, tiny_model, tmp_path):
    overlap = {"runtime__max_concurrent_rollouts": 3, "runtime__max_lag": 2, "checkpoint__every": 2}
    tree = episode_recipe(tiny_model("llama"), train__steps=6, **(overlap | ASYNCHRONOUS[mode]))
    with pytest.raises(Died):
        go(tmp_path / "run", tree, observer=die_at("step", lambda record, sample: record["step"] == 3))
    assert go(tmp_path / "run", tree, resume=True).status == "done"
    records = assert_whole(tmp_path / "run", steps=6)
    assert sum(record["async/evicted"] for record in records) == 0
    if "algorithm" in ASYNCHRONOUS[mode]:
        # how many episodes run at a publish is the machine's; tests/train/test_next_policy.py proves their log-probs
        assert all({"next/written", "next/missing_fraction"} <= record.keys() for record in records)
