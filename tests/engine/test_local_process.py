"""The engine in a process of its own: the completions of the one in this process, whatever happens to the process."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from proxima.data import UserError
from proxima.engine.local.local_engine import Local, LocalEngine, collect
from proxima.engine.process.process_engine import LocalProcess
from proxima.engine.protocol import Engine, EngineSetup, Sampling, WeightUpdate
from proxima.laws import engine_laws
from proxima.laws.engine_case import EngineUnderTest
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from tests.engine.helpers import engine, prompt, requests, run, scores, untruncated
from tests.engine.test_interrupt import SEEDS, with_kept_kv
from tests.engine.test_kept_prefixes import first_turns, next_turns
from tests.model.families import make
from tests.model.rows import loaded
from tests.processes import eventually, is_running
from tests.runtime.tiny_run import Watcher, go, recipe
from tests.warm import WarmPopen

SAMPLINGS = [
    Sampling(max_tokens=12),
    Sampling(max_tokens=20, temperature=0.7, stop=("a", "é!", "xyz")),
    Sampling(max_tokens=17, top_k=5, top_p=0.9),
    Sampling(max_tokens=1, min_p=0.05),
    Sampling(max_tokens=15, temperature=0.0),
    Sampling(max_tokens=30, temperature=1.3, top_k=40, stop=("\n",)),
]

pytestmark = pytest.mark.slow  # processes
ALIVE = 300.0  # seconds after which a process must be there, or gone


@contextlib.contextmanager
def served(model=None, seed=0, **settings):
    spec = LocalProcess(**{"slots": 8, "dtype": "float32"} | settings)
    engine = spec.build(replace(EngineSetup.of(model or loaded("llama")), seed=seed))
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def shared():
    """The one process here that is started as in a run: the others are forked, where torch is imported already."""
    with served() as engine_process:
        yield engine_process
        pid = pid_of(engine_process)
    eventually(lambda: not is_running(pid))
    engine_process.close()  # twice


def pid_of(engine):
    async def wait():
        while not (health := await engine.health()).ok:
            await asyncio.sleep(0.05)
        return health.detail["pid"]

    return asyncio.run(asyncio.wait_for(wait(), ALIVE))


def kill(pid, sign=signal.SIGKILL):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sign)


def state_of(stat):
    return stat.read_text().rpartition(")")[2].split()[0]


def freeze(pid):
    """Stop the process and wait until it has stopped: the signal returns before its threads do."""
    kill(pid, signal.SIGSTOP)
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    eventually(lambda: all(state_of(thread / "stat") == "T" for thread in threads))


# ---- the same as in this process -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_completions_are_those_of_the_engine_in_this_process(shared):
    asked = [replace(r, sampling=SAMPLINGS[i % len(SAMPLINGS)]) for i, r in enumerate(requests(5, 4))]
    plain = run(engine(slots=8), asked)
    assert run(shared, asked) == plain
    assert run(shared, asked[3:9]) == plain[3:9]  # from another event loop
    assert run(shared, []) == []
    in_this: Engine = engine(slots=8)
    assert shared.capabilities == in_this.capabilities


@pytest.mark.slow
def test_later_turns_of_one_prompt_keep_their_own_tokens(shared):
    asked = first_turns(2, 3, max_tokens=5)
    again = next_turns(asked, run(shared, asked))
    given = run(shared, again)
    expected = [run(engine(), [request])[0] for request in again]
    assert [c.tokens.tolist() for c in given] == [c.tokens.tolist() for c in expected]


def test_scores_are_those_of_the_engine_in_this_process(shared):
    asked = requests(3, 2)
    given = run(shared, asked)
    ours, theirs = (scores(each, asked, given) for each in (shared, engine(slots=8)))
    assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist()


def test_errors_travel(shared):
    too_long = replace(requests(1, 1)[0], prompt=prompt(0, 300))
    with pytest.raises(UserError, match="prompt 0 has 300 tokens; the limit, one new token included, is 256"):
        run(shared, [too_long])
    assert len(run(shared, requests(1, 2))) == 2


@pytest.mark.slow
async def test_pause_abort_and_a_caller_that_leaves(shared):
    asked = requests(3, 4, max_tokens=60, temperature=0.3)
    leaving = shared.generate(requests(2, 4, first=20, max_tokens=200))
    await anext(leaving)
    await leaving.aclose()
    await shared.pause()
    task = asyncio.ensure_future(collect(shared, asked))
    while not ((held := await shared.health()).ok and held.waiting == 12):
        await asyncio.sleep(0.05)  # what the caller has left is discarded after its call
    assert held.running == 0 and not task.done()
    await shared.abort(1)
    await shared.resume()
    for completion, whole in zip(await task, await collect(engine(), asked), strict=True):
        if completion.prompt_uid == 1:
            assert completion.finish_reason == "abort" and not len(completion.tokens)
        else:
            assert completion == whole


@pytest.mark.slow
@pytest.mark.parametrize("law", [engine_laws.in_flight, engine_laws.pausing])
async def test_the_laws_of_what_interrupts_completions(law, shared):
    """The other laws hold where completions are the same, and scores."""
    await law(EngineUnderTest(shared.spec, EngineSetup.of(loaded("llama"))), shared)


@pytest.mark.slow
async def test_all_that_a_completion_may_carry_arrives(warm_processes):
    """Of an engine that differs from the trainer on purpose."""
    settings = {"routed_experts": True, "sampling_mask": True, "top_k_log_probs": 3, "weights": "int4", "noise": 0.2}
    model, asked = make("Qwen3-MoE"), requests(3, 2, top_p=0.9)
    with served(model, seed=7, **settings) as engine_process:
        given, health = await collect(engine_process, asked), await engine_process.health()
    assert given == await collect(LocalEngine(model, Local(slots=8, dtype="float32", **settings), seed=7), asked)
    for name in ("routed_experts", "prompt_routed_experts", "sampling_mask", "top_k"):
        assert all(getattr(completion, name) is not None for completion in given), name
    assert health.detail["pid"]


@pytest.mark.slow
def test_weights_published_midway(warm_processes):
    """Completions of several versions, with the KV that each version has computed."""
    asked = requests(4, 4, max_tokens=60, top_k=200)

    async def go(engine):
        task = asyncio.ensure_future(collect(engine, asked))
        for version, seed in enumerate(SEEDS):
            while version and not task.done() and not (await engine.health()).running:
                await asyncio.sleep(0)
            await engine.pause()
            await engine.publish(WeightUpdate(version=version, module=loaded("llama", seed).model))
            assert (await engine.health()).version == version
            await engine.resume()
        return await task

    with served(interrupt="keep") as engine:
        pid_of(engine)
        for _ in range(5):  # again, where this process was too slow to publish while anything ran
            made = asyncio.run(go(engine))
            pairs = [pair for pair in zip(asked, made, strict=True) if len(set(pair[1].policy_version)) > 1]
            if pairs:
                break
    some, mixed = zip(*pairs[:4], strict=True)
    torch.testing.assert_close(untruncated(mixed), with_kept_kv(some, mixed), rtol=0, atol=2e-5)


# ---- a process that dies ---------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_killed_while_completions_arrive_the_others_come_once(warm_processes):
    asked, arrived = requests(4, 4, max_tokens=100, temperature=1.2), []
    with served() as local:
        async for completion in local.generate(asked):
            if not arrived:
                kill(local._supervisor.process.pid)
            arrived.append(completion)
    plain = await collect(engine(), asked)
    assert sorted(arrived, key=lambda completion: completion.key) == plain


@pytest.mark.slow
async def test_killed_in_a_pause_and_in_a_publish(warm_processes):
    asked = requests(3, 4, max_tokens=40)
    with served() as local:
        await local.pause()
        task = asyncio.ensure_future(collect(local, asked))
        kill(local._supervisor.process.pid)
        await local.abort(99)  # answered by the next process
        assert (await local.health()).running == 0 and not task.done()
        publishing = asyncio.ensure_future(local.publish(WeightUpdate(version=5, module=loaded("llama", 4).model)))
        await asyncio.sleep(0)
        kill(local._supervisor.process.pid)
        await publishing
        assert (await local.health()).version == 5 and not task.done()
        await local.resume()
        made = await task
    plain = await collect(engine(seed=4), asked)
    assert [c.tokens.tolist() for c in made] == [c.tokens.tolist() for c in plain]
    assert {v for c in made for v in c.policy_version} == {5}


@pytest.mark.slow
def test_a_process_that_hangs_is_replaced(monkeypatch, warm_processes):
    """Time runs for the answers of a process that is frozen, and for no others."""
    frozen, asked = set(), requests(2, 4)

    async def wait_for(answer, seconds):
        task, pid = asyncio.ensure_future(answer), engine_process._supervisor.process.pid
        while not task.done() and pid not in frozen:
            await asyncio.wait({task}, timeout=0.02)
        return await asyncio.wait_for(task, seconds if pid in frozen else None)

    timed = SimpleNamespace(**{**vars(asyncio), "wait_for": wait_for})
    monkeypatch.setattr("proxima.engine.process.process_engine.asyncio", timed)
    monkeypatch.setattr(
        "proxima.engine.process.process_engine.HEALTH_SECONDS", 0.1
    )  # it is asked before it is replaced
    with served(timeout=0.4) as engine_process:
        first = pid_of(engine_process)
        freeze(first)
        frozen.add(first)
        health = asyncio.run(engine_process.health())
        assert not health.ok or engine_process._supervisor.exits
        assert run(engine_process, asked) == run(engine(slots=8), asked)
        assert pid_of(engine_process) != first and not is_running(first)
        assert engine_process._supervisor.exit_reason == "it gave no answer for 0.4 s (engine.timeout) and was killed"


@pytest.mark.slow
def test_what_is_left_of_an_ended_process_takes_nothing_from_the_next(monkeypatch, warm_processes):
    """Its writer, collected late, closes a transport whose descriptor is that of the next process."""
    connect, writers = asyncio.open_connection, []

    async def connected(**facts):
        reader, writer = await connect(**facts)
        if len(writers) == 1:
            writers.clear()
            gc.collect()
        else:
            writers.append(writer)
        return reader, writer

    monkeypatch.setattr("proxima.engine.process.process_engine.asyncio.open_connection", connected)
    with served() as engine_process:
        kill(pid_of(engine_process))
        eventually(lambda: engine_process._supervisor.exits and engine_process._supervisor.ready)
        assert run(engine_process, requests(1, 1)) == run(engine(slots=8), requests(1, 1))
        assert engine_process._supervisor.exits == 1 and not writers


@pytest.mark.slow
def test_when_the_restarts_are_spent_one_line_says_why(tmp_path, warm_processes):
    log = tmp_path / "engine.log"
    engine = LocalProcess(dtype="float32", restarts=0).build(replace(EngineSetup.of(loaded("llama")), log=log))
    try:
        kill(pid_of(engine))
        with pytest.raises(UserError) as engine_process:
            run(engine, requests(1, 1))
        assert str(engine_process.value) == (
            "the engine's process ended once without a completion: SIGKILL, which the kernel sends when "
            f"memory runs out; see {log}; resume the run (--resume), or raise engine.restarts"
        )
        with pytest.raises(UserError, match="ended once"):
            asyncio.run(engine.pause())
        assert not asyncio.run(engine.health()).ok
        assert "ready, version 0, 1 threads" in log.read_text()
    finally:
        engine.close()


@pytest.mark.slow
def test_what_is_wrong_from_the_start_is_raised_not_repeated(warm_processes):
    with pytest.raises(UserError, match="engine.decoder='fast': family gpt2 has no fast path"):
        LocalProcess(decoder="fast").build(EngineSetup.of(loaded("gpt2")))
    broken = loaded("llama")
    broken.model.config.num_key_value_heads = 4
    with served(broken) as engine:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="config does not describe its weights: model.layers.0"):
                run(engine, requests(1, 1))
            eventually(lambda: engine._supervisor.exits == 1)
        assert len(warm_processes) == 1 and not is_running(warm_processes[0].pid)


@pytest.mark.slow
def test_the_process_ends_with_the_run_however_that_ends():
    script = """
import asyncio, time
from proxima.process import children as starting
from proxima.engine.process.process_engine import LocalProcess
from proxima.engine.protocol import EngineSetup
from tests.model.rows import loaded
from tests.warm import forked_subprocess
starting.subprocess = forked_subprocess()
engine = LocalProcess(dtype="float32").build(EngineSetup.of(loaded("llama")))
while not asyncio.run(engine.health()).ok: time.sleep(.05)
print(engine._supervisor.process.pid, flush=True)
time.sleep(600)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = WarmPopen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment, text=True)
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    parent.wait()
    eventually(lambda: not is_running(pid))


# ---- in a run --------------------------------------------------------------------------------------------------------


def same_run(first, second):
    def read(folder, name):
        return (folder / name).read_bytes()

    weights = "checkpoints/000003/model/model.safetensors"
    assert read(first, weights) == read(second, weights)
    for step in (1, 2, 3):
        assert read_rows(RunFolder(first).rollout_file(step)) == read_rows(RunFolder(second).rollout_file(step))


@pytest.mark.campaign("tests/engine/test_local_process.py::test_killed_while_completions_arrive_the_others_come_once")
def test_a_run_is_the_same_to_the_bit_killed_engines_and_all(tiny_model, tmp_path, warm_processes):
    """Killed after a step, and while completions arrive."""
    tree = recipe(tiny_model("llama"))
    go(tmp_path / "local", tree)
    own = {**tree, "engine": {"kind": "local_process", "dtype": "float32", "slots": 8, "restarts": 20}}
    moments, killed = ["step", "generate"], []

    def interfere(event, *facts):
        moment = facts[0] if event == "progress" and facts[1] else event
        if moment in moments[:1] and warm_processes[-1].pid not in killed:
            killed.append(warm_processes[-1].pid)
            kill(killed[-1])
            del moments[0]

    assert go(tmp_path / "own", own, observer=Watcher(interfere)).status == "done"
    assert not moments
    same_run(tmp_path / "local", tmp_path / "own")
    eventually(lambda: not any(is_running(process.pid) for process in warm_processes))
