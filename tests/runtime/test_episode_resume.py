"""Runs whose completions are episodes, killed and resumed, in every mode that decides what a step trains on: those that
depend on no moment are the unbroken run to the bit; of the others each prompt is consumed once."""

import threading
from contextlib import suppress
from http.server import ThreadingHTTPServer

import pytest

from tests.engine.http.model_server import Handler, ModelVllm
from tests.runtime.episode_world import episode_recipe, go, whole
from tests.runtime.episode_world import mark as mark
from tests.runtime.interruptions import PLACES, Died, die_at
from tests.runtime.test_async_run import assert_whole
from tests.runtime.tiny_run import assert_same

AGENT = {
    f"{task}__environment": {"kind": "agent", "run": "tests.runtime.echo_agent:play"} for task in ("task", "eval__task")
}
SYNCHRONOUS = {
    "an engine of its own": {"engine__kind": "local_process", "engine__threads": 1},
    "an agent from outside": AGENT,
    "dynamic sampling, pruning that allocates": {
        "algorithm": {
            "preset": "grpo",
            "selection": [
                {"kind": "drop_uniform_groups", "metric": "reward"},
                {"kind": "prune", "rate": 0.5, "allocate": True},
            ],
            "dynamic_sampling": {"max_num_gen_batches": 8, "oversample": 1.5},
        }
    },
    "returns of turns": {"algorithm": {"preset": "grpo", "advantage": {"kind": "turn_returns"}}},
    "states in common": {"algorithm": {"preset": "grpo", "advantage": {"kind": "gigpo"}}},
    "a critic": {"algorithm": {"preset": "ppo", "advantage": {"kind": "gae"}}, "critic": {"kind": "head"}},
}


@pytest.mark.parametrize("mode", SYNCHRONOUS)
def test_a_resumed_run_is_the_unbroken_one(mode, tiny_model, tmp_path, mark, warm_processes):
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
    "an agent from outside": AGENT,
}


@pytest.mark.parametrize("mode", ASYNCHRONOUS)
def test_a_resumed_asynchronous_run_consumes_each_prompt_once(mode, tiny_model, tmp_path, mark):
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


def test_a_resumed_replay_of_asynchronous_episodes_is_the_unbroken_one(tiny_model, tmp_path):
    overlap = {"runtime__max_concurrent_rollouts": 3, "runtime__max_lag": 2}
    recorded = episode_recipe(tiny_model("llama"), train__steps=4, **overlap)
    assert go(tmp_path / "recorded", recorded).status == "done"
    again = {"algorithm": {"preset": "dppo"}, "rollouts": str(tmp_path / "recorded")}
    tree = episode_recipe(tiny_model("llama"), train__steps=4, **again)
    assert go(tmp_path / "unbroken", tree).status == "done"
    for place in ("while training", "after step 3"):
        with pytest.raises(Died):
            go(tmp_path / "run", tree, resume=True, observer=die_at(*PLACES[place]))
    assert go(tmp_path / "run", tree, resume=True).status == "done"
    assert_same(whole(tmp_path / "run"), whole(tmp_path / "unbroken"))


@pytest.fixture
def server(tiny_model):
    """The address of a server that speaks vLLM's protocol."""
    Handler.fake = ModelVllm(str(tiny_model("llama")))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()


def test_episodes_at_a_server_are_resumed(server, tiny_model, tmp_path, mark):
    """A server gives no bits back that it gave before; each prompt is trained on once."""
    overlap = {"runtime__max_concurrent_rollouts": 3, "runtime__max_lag": 2}
    tree = episode_recipe(tiny_model("llama"), engine={"kind": "vllm", "url": server}, train__steps=4, **overlap)
    with pytest.raises(Died):
        go(tmp_path / "run", tree, observer=die_at(*PLACES["after step 3"]))
    assert go(tmp_path / "run", tree, resume=True).status == "done"
    records = assert_whole(tmp_path / "run")
    assert all(record["episode/turns/mean"] > 1 and record["sync/probe_max"] < 1e-3 for record in records)
