"""Whole runs whose engine or hooks are at fault: one line names it, nothing is trained on, and a resume goes on."""

import asyncio
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from proxima.data import NotFiniteError, UserError
from proxima.engine.executor import Executor
from proxima.engine.local.local_engine import Local, LocalEngine
from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.state.folder import RunFolder
from proxima.training.checkpoint import checkpoints
from tests.campaigns import campaign
from tests.runtime.interruptions import interrupt
from tests.runtime.test_async_run import assert_whole, tree
from tests.runtime.test_sdp_run import SHORT
from tests.runtime.test_sdp_run import tree as sdp_tree
from tests.runtime.tiny_run import Watcher, go, saved_in, steps_of

OVERLAP = {"sync": {"runtime__max_concurrent_rollouts": None, "runtime__max_lag": 0}, "async": {}}
BAD = {  # field, value, message
    "sync": [
        ("sampled_log_prob", lambda c: c.sampled_log_prob[:-1], r"\d values for \d tokens"),
        ("policy_version", lambda c: None, r"missing for \d tokens"),
        ("policy_version", lambda c: c.policy_version + 7, r"\d+, but the weights are of \d"),
    ],
    "async": [
        ("untruncated_log_prob", lambda c: np.append(c.untruncated_log_prob, -1.0), r"\d values for \d tokens"),
        ("policy_version", lambda c: -1, "-1, but versions begin with 0"),
    ],
}


def with_fault(generate, field, value):
    """`generate` with a wrong field in one completion of the third step."""

    async def faulty(self, requests):
        async for completion in generate(self, requests):
            wrong = (completion.prompt_uid, completion.sample) == (9, 2) and len(requests) > 1
            yield replace(completion, **{field: value(completion)}) if wrong else completion

    return faulty


@pytest.mark.slow
@pytest.mark.parametrize("mode", OVERLAP)
def test_bad_completions_are_named_and_never_trained_on(mode, tiny_model, tmp_path, monkeypatch):
    """One fault after the other at the same place of a run."""
    generate, config = LocalEngine.generate, tree(tiny_model("llama"), **OVERLAP[mode])
    for field, value, message in BAD[mode]:
        monkeypatch.setattr(LocalEngine, "generate", with_fault(generate, field, value))
        said = rf"^prompt 9, sample 2, turn 0: Completion.{field}: {message}; the engine is at fault: .*resume"
        with pytest.raises(UserError, match=said):
            go(tmp_path / "run", config, resume=True)
        assert saved_in(tmp_path / "run")[-1].step <= 2
    monkeypatch.undo()
    assert go(tmp_path / "run", config, resume=True).status == "done"
    assert_whole(tmp_path / "run")


@dataclass(frozen=True, kw_only=True)
class Hooked(Local):
    """A user's engine, with a hook of his own."""

    kind: ClassVar[str] = "hooked"
    calls: ClassVar[list[str]] = []

    def build(self, setup):
        executor = Executor(super().build(setup))
        executor.register_post_pause_hook(lambda: self.calls.append("paused"))
        return executor


@pytest.mark.slow
def test_the_engine_of_a_recipe_may_register_hooks(tiny_model, tmp_path):
    Hooked.calls.clear()
    kind = f"{__name__}:Hooked"
    go(tmp_path / "run", tree(tiny_model("llama"), engine__kind=kind))
    published = sum(record.get("updates", 0) > 0 for record in RunFolder(tmp_path / "run").read_metrics())
    assert published and Hooked.calls == ["paused"] * (1 + published)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "mode"), [("post_pause", "async"), ("post_resume", "sync")])
def test_a_hook_that_raises_ends_a_whole_step(stage, mode, tiny_model, tmp_path, monkeypatch):
    made, calls = Executor.__init__, []

    def failing_hook():
        calls.append(1)
        if len(calls) == 3:  # at the start, after step 1, after step 2
            raise OSError("no route")

    def init(self, engine, **more):
        made(self, engine, **more)
        getattr(self, f"register_{stage}_hook")(failing_hook)

    monkeypatch.setattr(Executor, "__init__", init)
    config = tree(tiny_model("llama"), checkpoint__every=0, **OVERLAP[mode])
    message = rf"^after step 2: 1 {stage} hook failed: \S*failing_hook: OSError: no route; repair or remove .*resume"
    with pytest.raises(RunEnded, match=message):
        go(tmp_path / "run", config)
    assert [c.step for c in saved_in(tmp_path / "run")] == [2]
    monkeypatch.undo()
    assert go(tmp_path / "run", config, resume=True).status == "done"
    assert_whole(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        "score",
        "slow",
        *campaign(
            "tests/runtime/test_engine_faults.py::test_a_window_that_the_engine_misses_costs_no_run",
            ["in_flight", "short"],
        ),
    ],
)
def test_a_window_that_the_engine_misses_costs_no_run(what, tiny_model, tmp_path, monkeypatch):
    async def broken(self, *asked):
        if what == "slow":
            await asyncio.sleep(60)
        if what == "short":
            return []
        raise ConnectionError("gone")

    messages = {"slow": "TimeoutError: no answer in 0.05 s", "short": "ValueError: score gave "}
    monkeypatch.setattr("proxima.training.next_policy.SCORE_SECONDS", 0.05 if what == "slow" else 60)
    monkeypatch.setattr(LocalEngine, "in_flight" if what == "in_flight" else "score", broken)
    watcher = Watcher()
    source = "trainer" if what == "in_flight" else "engine"
    config = sdp_tree(tiny_model("llama"), algorithm__next_from=source, **SHORT, train__steps=4)
    assert go(tmp_path / "run", config, observer=watcher).status == "done"
    warnings = [w for w in watcher.warnings if "the engine gave no next_log_prob" in w]
    assert messages.get(what, "ConnectionError: gone") in warnings[-1]
    assert len(warnings) == len({w[:7] for w in warnings})
    assert any(r["next/missing_fraction"] > 0 for r in steps_of(tmp_path / "run"))


@pytest.mark.parametrize("error", [UserError("no such port"), NotFiniteError("NaN")])
def test_what_the_user_must_fix_still_ends_the_run(error, tiny_model, tmp_path, monkeypatch):
    async def broken(self, asked):
        raise error

    monkeypatch.setattr(LocalEngine, "score", broken)
    with pytest.raises(RunEnded if isinstance(error, NotFiniteError) else UserError, match=str(error)):
        go(tmp_path / "run", sdp_tree(tiny_model("llama"), **SHORT))


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3])
def test_torn_rollouts_cost_their_step_at_most(step, tiny_model, tmp_path):
    """Those of a step after the last checkpoint come again; without earlier ones a run goes on."""
    config, run = tree(tiny_model("llama"), checkpoint__every=1), RunFolder(tmp_path / "run")
    interrupt(go, run.path, config, "after step 3")
    assert checkpoints(run.checkpoints)[-1].step == 2
    file = run.rollout_file(step)
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    assert go(run.path, config, resume=True).status == "done"
    if step == 1:
        said = r"000001.parquet is not a complete Parquet file .* its completions are lost"
        with pytest.raises(UserError, match=said):
            assert_whole(run.path)
        file.write_bytes(whole)
    assert_whole(run.path)
