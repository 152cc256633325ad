"""Runs whose completions are episodes, killed and resumed, in every mode that decides what a step trains on: those that
depend on no moment are the unbroken run to the bit; of the others each prompt is consumed once."""

import random

import pytest

from tests.engine.http.model_server import ModelVllm
from tests.engine.http.raw_server import RawServer
from tests.runtime.episode_world import episode_recipe, go, kill_workers
from tests.runtime.interruptions import interrupt_and_resume
from tests.runtime.runs import AGENT, ROLES
from tests.runtime.test_async_run import assert_whole
from tests.runtime.tiny_run import NO_EVAL, Watcher

pytestmark = pytest.mark.slow

OVERLAP = {"runtime__max_concurrent_rollouts": 3, "runtime__max_lag": 2, "train__prompts_per_step": 2, **NO_EVAL}
NEXT = {"preset": "grpo", "proximal": "next", "correction": [{"kind": "importance", "towards": "next"}]}
ASYNCHRONOUS = {
    "wait": {},
    "train": {"runtime__over_age": "train", "runtime__max_lag": 4},  # more than the run has: none is too old
    "drop": {"runtime__over_age": "drop"},
    "the next policy": {"algorithm": NEXT},
    "an agent from outside": {f"{task}__environment": AGENT for task in ("task", "eval__task")},
    "roles": {"task__environment": ROLES["task__environment"], "algorithm__advantage": {"kind": "rloo"}},
}


WAITING = pytest.mark.campaign(
    "tests/runtime/test_episode_resume.py::test_a_resumed_asynchronous_run_consumes_each_prompt_once[wait]"
)


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=[WAITING] * (mode != "wait")) for mode in ASYNCHRONOUS])
def test_a_resumed_asynchronous_run_consumes_each_prompt_once(mode, tiny_model, tmp_path, mark):
    tree = episode_recipe(tiny_model("llama"), checkpoint__every=1, **OVERLAP | ASYNCHRONOUS[mode])
    interrupt_and_resume(go, tmp_path / "run", tree, "after step 2")
    records = assert_whole(tmp_path / "run", steps=3, prompts=2, lag=tree["runtime"]["max_lag"])
    if mode != "drop":  # how many are too old is the machine's
        assert sum(record["async/evicted"] for record in records) == 0
    if "algorithm" in ASYNCHRONOUS[mode]:
        # how many episodes run at a publish is the machine's; tests/training/test_next_policy.py proves their log-probs
        assert all({"next/written", "next/missing_fraction"} <= record.keys() for record in records)


def test_workers_and_engines_of_an_asynchronous_run_are_killed(tiny_model, tmp_path, mark, warm_processes):
    own = OVERLAP | {"engine__kind": "local_process", "engine__threads": 1, "episode__retries": 50}
    draw, killed = random.Random(0), list[int]()

    def kill(event, *facts):
        if event == "step":
            killed.append(kill_workers(mark, draw))
        if event == "step" and facts[0]["step"] == 1:
            for process in warm_processes:
                process.kill()

    tree = episode_recipe(tiny_model("llama"), **own)
    assert go(tmp_path / "run", tree, observer=Watcher(kill)).status == "done"
    records = assert_whole(tmp_path / "run", steps=3, prompts=2)
    assert sum(record["episode/failed"] for record in records) == 0 and sum(killed) > 0


def test_episodes_at_a_server_are_resumed(tiny_model, tmp_path, lent_servers):
    """A server gives no bits back that it gave before; each prompt is trained on once."""
    small = {"train__steps": 2, "sampling__max_tokens": 6}
    with RawServer(ModelVllm(str(tiny_model("llama")))) as server:
        tree = episode_recipe(tiny_model("llama"), engine={"kind": "vllm", "url": server.url}, **small, **OVERLAP)
        interrupt_and_resume(go, tmp_path / "run", tree, "after step 2")
    records = assert_whole(tmp_path / "run", steps=2, prompts=2)
    assert all(record["episode/turns/mean"] > 1 and record["sync/probe_max"] < 1e-3 for record in records)
