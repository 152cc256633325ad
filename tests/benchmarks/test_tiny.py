"""Every benchmark once, at sizes of a second, so that none breaks unnoticed. It says nothing about speed.

Of those that need a peer's environment the own side runs: a stand-in answers for TRL and for vLLM.
"""

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from time import monotonic
from types import SimpleNamespace

import pytest

from benchmarks import harness, long_tail
from benchmarks.__main__ import CLAIMS
from benchmarks.kills import asynchronous, episodes
from benchmarks.simulate_vs_run.run import SETTINGS
from proxima.process import children as starting
from proxima.runtime.watch.activity import Activity
from proxima_plan.rehearsal import rehearsal
from tests.cli.warm_rehearsals import WarmExecutor
from tests.runtime.episode_world import MARK
from tests.sandboxes import needs_bubblewrap
from tests.warm import ROOT, forked_subprocess

BATCH = "--prompts 2 --completions 2"
TINY = {  # the options of each
    "busy_machine": "--repeats 1 --dtype float32 --tokens 3 --spins 50 --beside nothing 'one loop at nice 0'",
    "simulate_vs_run": "--steps 4",
    "shared_prompt": f"--shapes 5x3 70+5x3 {BATCH}",
    "shared_paths": "--shapes 3x4x9 --prompt 3 --completions 1",
    "pruned_update": "--shape 5x3 --rates 0 0.5 --prompts 1 --completions 4",
    "math_reward": "--answers 48 --plain 8 --workers 1",
    "sandbox": "",
    "vllm_throughput": "--requests 2 --tokens 3",
    "layouts": "--only qwen3_4b_grpo",
    "balance": "--repeats 1",
    "early_stop": "--repeats 2",
    "rank_zero": "--part 0.01",
    "host_memory": "--layers 1 --tokens 80",
    "sync": "--layers 1 --repeats 1 --only qwen3_4b_8xH100",
    "kernels": "--shapes Qwen3-1.7B --eager",
    "rank_memory": "--ranks 1 --tokens 60 --length 12",
    "rank_speed": "--repeats 1 --steps 3 --examples 1 --length 20 --sides 'one process' 'two ranks'",
    "served_clients": "--repeats 1 --turns 1 --prompts 1 --max-tokens 3",
    "kills": "--kills 1",
    "nan_campaign": "--places 1",
    "ranks": "--only 'SFT, tiny Qwen3, SGD' --ranks 2",
    "where": "--tiny",
    "decode_vs_hf": "--rows 4 --prompts 2 --tokens 3 --dtype float32",
    "step_vs_trl": f"{BATCH} --max-tokens 3 --peer-python none",
    "offline_vs_trl": "--rows 2 --words 10 --peer-python none",
    "async_vs_sync": "--seeds 1 --steps 5",
    "plan": "",
    "weight_ipc": "--parameters 1e5",
    "processors": "--processors generic --completions 2",
    "view": "--shape 8x20 --long 40",
    "segment_wise": "--seeds 1 --steps 7 --sides sdp",
}
# the others take seconds, in processes of their own
QUICK = {"shared_prompt", "shared_paths", "pruned_update", "vllm_throughput", "layouts", "plan"}
APART = {"kernels", "sync"}  # a fake device stays registered in its process
PEERS = {"step_vs_trl.trl_side", "offline_vs_trl.trl_side"}


def test_every_benchmark_has_a_tiny_repeat():
    folders = {file.parent.name for file in harness.HERE.glob("*/run.py")}
    assert folders == set(CLAIMS) == set(TINY)


class Sides(harness.Side):
    """A side of ours; of a peer, one that answers without having measured anything."""

    def __init__(self, name, module, settings, **options):
        self.stands_in = module in PEERS
        if self.stands_in:
            self.name, self.about = name, {"versions": {"trl": "none"}}
        else:
            super().__init__(name, module, settings, **options)

    def once(self):
        return {"seconds": 1.0, "length": 1.0} if self.stands_in else super().once()

    def close(self):
        if not self.stands_in:
            super().close()


def smaller(recipe):
    """The long-tailed recipe with eight short completions a step, generated in the run's own process."""

    def tiny(*args, **options):
        tree = recipe(*args, **options)
        tree["engine"] = {"kind": "local", "dtype": "float32", "slots": 8}
        tree["sampling"]["max_tokens"] = 12
        tree["train"] |= {"prompts_per_step": 2, "completions_per_prompt": 4}
        tree["eval"] |= {"limit": 4}
        return tree

    return tiny


@pytest.fixture
def measured(monkeypatch, tiny_model, tmp_path, capsys):
    """A function that runs a benchmark with its options, one measurement of each side; returns its result."""
    forked = forked_subprocess(started := [])
    engine = {"kind": "local", "slots": 8, "dtype": "float32"}
    smallest = {"engine": engine, "sampling": {"max_tokens": 8}, "train__prompts_per_step": 2}
    # the runs are no children of this process
    used = SimpleNamespace(RUSAGE_CHILDREN=0, getrusage=lambda _: SimpleNamespace(ru_utime=monotonic(), ru_stime=0.0))
    monkeypatch.setattr(long_tail, "resource", used)
    for name, value in (smallest | {"train__completions_per_prompt": 2}).items():
        monkeypatch.setitem(SETTINGS, name, value)

    def run(claim):
        module = importlib.import_module(f"benchmarks.{claim}.run")
        changes = {"CACHE": tmp_path / "cache", "Side": Sides, "subprocess": forked}
        changes |= {"Popen": forked.Popen, "run_process": forked.run}
        parts = [part for name, part in sys.modules.items() if name.startswith(f"benchmarks.{claim}.")]
        for place in (harness, long_tail, *parts):
            for name in changes.keys() & vars(place).keys():
                monkeypatch.setattr(place, name, changes[name])
        monkeypatch.setattr(rehearsal, "ProcessPoolExecutor", WarmExecutor)
        monkeypatch.setattr(harness, "commit", lambda: "none")
        replaced = {"recipe": smaller(long_tail.recipe), "import_everything": lambda: None, "IDLE": 1.0}
        for name, value in (replaced | {"peer_python": lambda _: sys.executable}).items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
        options = ["--model", str(tiny_model("llama")), "--threads", "1", "--repeats", "1"]
        out = tmp_path / "result.json"
        words = [*options, "--json-out", str(out), *shlex.split(TINY[claim])]
        monkeypatch.setattr(sys, "argv", [claim, *words])
        if claim in APART:
            command = [sys.executable, "-m", f"benchmarks.{claim}", *words]
            printed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
        elif claim == "vllm_throughput":
            own_side_of_vllm(module, tiny_model("llama"), out)
            printed = capsys.readouterr().out
        else:
            module.main()
            printed = capsys.readouterr().out
        result = json.loads(out.read_text())
        assert json.loads(printed.splitlines()[-1]) == result
        return result

    yield run
    for process in started:  # none outlives its test
        process.kill()
        process.wait()


def own_side_of_vllm(module, model, out):
    """What the benchmark does with an engine, and its report; no server runs."""
    import numpy as np

    from proxima.data.flow import Prompt
    from proxima.engine.local.local_engine import Local, LocalEngine
    from proxima.model.load import load

    engine = LocalEngine(load(str(model), device="cpu"), Local(slots=2, dtype="float32"))
    texts = module.questions(2, 1)
    prompts = [Prompt(uid=i, messages=(), tokens=np.arange(1, 4 + len(text) % 3)) for i, text in enumerate(texts)]
    single = module.ours(engine, prompts, 3)
    single |= {"tokens": 6, "rate": single["tokens"] / single["seconds"]}
    options = SimpleNamespace(requests=2, tokens=3, running=2, repeats=1, model=str(model), json_out=Path(out))
    module.report({module.PEER: [single], "proxima": [single]}, options)


@pytest.mark.parametrize("claim", TINY)
def test_it_can_be_imported(claim):
    assert callable(importlib.import_module(f"benchmarks.{claim}.run").main)


def later(claim):
    mark = pytest.mark.campaign(f"tests/benchmarks/test_tiny.py::test_it_can_be_imported[{claim}]")
    return [mark, needs_bubblewrap] if claim == "sandbox" else [mark]


RESUMED = "tests/runtime/test_resumed_runs.py::test_a_resumed_run_equals_an_unbroken_one"


@pytest.mark.slow
@pytest.mark.parametrize("claim", [c if c in QUICK else pytest.param(c, marks=later(c)) for c in TINY])
def test_it_runs(claim, measured):
    result = measured(claim)
    assert result["machine"]["cores"] >= 1 and result["versions"]["proxima"]
    if claim in ("kills", "nan_campaign", "ranks"):
        assert result["wrong"] == []
    elif claim == "simulate_vs_run":
        assert set(result["runs"]) == {"lag 1", "lag 3", "lag 3, times of lag 1"}
    else:
        assert result["claim"] == claim


@pytest.mark.campaign(RESUMED)
def test_kills_of_runs_that_play_episodes(monkeypatch, tmp_path):
    monkeypatch.setattr(episodes, "STEPS", 2)
    monkeypatch.setenv(MARK, "")  # all three are changed, for good
    monkeypatch.setattr(starting, "subprocess", starting.subprocess)
    monkeypatch.setattr(Activity, "stage", Activity.stage)
    earlier = {"kind": "sync", "commit": "earlier", "hits": [["trainer", "start"]], "wrong": []}
    (file := tmp_path / "runs.jsonl").write_text(json.dumps(earlier) + "\n")
    result = episodes.campaign(tmp_path, file, 2, kinds=["sync"])
    assert result["wrong"] == [] and "earlier" in result["commits"] and sum(result["kills"].values()) >= 2
    assert 2 <= result["runs"] == result["runs_as_expected"] == len(episodes.lines(file, "sync"))


@pytest.mark.campaign(RESUMED)
def test_kills_of_asynchronous_runs(measured, monkeypatch):
    monkeypatch.setattr(asynchronous, "STEPS", 3)
    monkeypatch.setattr(asynchronous, "COMPLETIONS", 4)
    monkeypatch.setattr(asynchronous, "PERMUTATIONS", 20)
    monkeypatch.setitem(TINY, "kills", "--asynchronous --kills 1 --whole 1 --processes 0")
    result = measured("kills")
    assert result["wrong"] == [] and result["completions"]["whole"] > 0
