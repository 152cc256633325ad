"""Whole asynchronous runs of segment-wise decoupled PPO: what each step read from the cache is what a replay with the
saved weights of that version gives; and a killed run has the cache again."""

import asyncio

import numpy as np
import pytest
import torch

from proxima.data.trajectory import Trajectory
from proxima.model.load import load
from proxima.model.policy import Policy
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.pending_files import read_next_policy
from proxima.runtime.state.rollouts import read_rows
from proxima.training.checkpoint import NEXT_POLICY, checkpoints
from proxima.training.next_policy import NextPolicy
from proxima.training.stack import TrainStack
from tests.campaigns import campaign
from tests.runtime.interruptions import interrupt
from tests.runtime.tiny_run import NO_EVAL, go, recipe_with, rollouts_of, saved_in, steps_of

pytestmark = pytest.mark.slow

STEPS = 5


tree = recipe_with(  # short and long completions, up to three versions old, under weights that move far in each step
    algorithm={"preset": "sdp"},
    runtime__max_concurrent_rollouts=8,
    runtime__max_lag=3,
    train__steps=STEPS,
    train__prompts_per_step=2,
    train__schedule="constant",
    train__warmup_steps=0,
    sampling={"max_tokens": 60, "stop": ["e"]},
    model__max_length=90,
    engine__slots=32,
    **NO_EVAL,
)
SHORT = {"sampling": {"max_tokens": 12}}


def compared(folder, model, atol):
    """How many log-probs the steps had from the cache, how many of completions of several versions, and how many they
    lacked."""
    run = RunFolder(folder)
    weights = {0: model} | {c.facts["policy_version"]: c.path / "model" for c in checkpoints(run.checkpoints)}
    stacks = {v: TrainStack(Policy(load(str(path)), compute_dtype=torch.float32)) for v, path in weights.items()}
    from_cache = interrupted = missing = 0
    distances = list[float]()  # of the log-probs of the version itself, which would be wrong
    for step in range(1, len(steps_of(folder)) + 1):
        rows = [row for row in read_rows(run.rollout_file(step)) if row["next_log_prob"] is not None]
        facts = ("prompt_tokens", "tokens", "temperature")
        items = [Trajectory(group=i, **{name: row[name] for name in facts}) for i, row in enumerate(rows)]
        log_probs = {version: stack.log_prob(items) for version, stack in stacks.items()}
        for i, row in enumerate(rows):
            cached, versions = np.array(row["next_log_prob"], np.float32), np.array(row["policy_version"])
            missing += int((np.isnan(cached) & (versions <= step - 1 - 2)).sum())
            for version in set(versions[~np.isnan(cached)].tolist()):
                assert version <= step - 1 - 1  # of a version whose successor was the newest, before this one's end
                places = (versions == version) & ~np.isnan(cached)
                expected, wrong = log_probs[version + 1][i], log_probs[version][i]
                np.testing.assert_allclose(cached[places], expected[places], atol=atol)
                from_cache += int(places.sum())
                interrupted += int(places.sum()) * (len(set(versions.tolist())) > 1)
                distances.append(float(np.abs(wrong[places] - expected[places]).max()))
    assert np.median(distances) > 10 * atol  # not each: a single token may be as likely under both
    return from_cache, interrupted, missing


STEPS_READ = "tests/runtime/test_sdp_run.py::test_what_the_steps_read_is_what_a_replay_with_the_saved_weights_gives"


@pytest.mark.parametrize(
    ("source", "engine"),
    [
        ("engine", "local"),
        *campaign("tests/runtime/test_sdp_run.py::test_a_killed_run_has_its_cache_again", [("trainer", "local")]),
        *campaign(f"{STEPS_READ}[engine-local]", [("engine", "local_process"), ("trainer", "local_process")]),
    ],
)
def test_what_the_steps_read_is_what_a_replay_with_the_saved_weights_gives(
    source, engine, tiny_model, tmp_path, monkeypatch, warm_processes
):
    monkeypatch.setattr(
        "proxima.engine.local.local_engine.STEPS_PER_TURN", 1
    )  # so that completions outlast several updates
    model, folder = tiny_model("llama"), tmp_path / "run"
    config = tree(model, algorithm__next_from=source, engine__kind=engine)
    assert go(folder, config).status == "done"
    from_cache, interrupted, missing = compared(folder, model, 3e-4)
    assert from_cache > 50 and missing == 0
    made = steps_of(folder)
    assert interrupted > 0 or engine == "local_process"  # there it depends on the machine
    assert all(r["next/missing_fraction"] == 0 for r in made) and any(r["next/cached_fraction"] > 0 for r in made)
    assert all(r["correction/rollout_is_mean"] > 0 for r in made)
    checkpoint = saved_in(folder)[2]
    uids = {entry.uid for entry in read_next_policy(checkpoint.path / NEXT_POLICY)}
    assert uids <= set(checkpoint.facts["pending"])


def test_a_killed_run_has_its_cache_again(tiny_model, tmp_path, monkeypatch):
    model, folder = tiny_model("llama"), tmp_path / "run"
    config = tree(model, algorithm__next_from="trainer", runtime__max_concurrent_rollouts=6, **SHORT)
    interrupt(go, folder, config, "after step 3")
    last = saved_in(folder)[-1]
    kept = read_next_policy(last.path / NEXT_POLICY)
    assert kept and {entry.uid for entry in kept} <= set(last.facts["pending"])
    given = []
    before = NextPolicy.__init__

    def watched(self, engine, held, trainer=None, entries=(), *others):
        given.extend(entries)
        before(self, engine, held, trainer, entries, *others)

    monkeypatch.setattr(NextPolicy, "__init__", watched)
    assert go(folder, config, resume=True).status == "done"
    assert given == kept
    from_cache, _, missing = compared(folder, model, 3e-4)
    assert from_cache > 20 and missing == 0


def test_a_chain_has_the_steps_of_all_versions_and_has_them_again(tiny_model, tmp_path):
    """Killed after two steps and resumed; against the saved weights of every version."""
    model, folder, cap = tiny_model("llama"), tmp_path / "run", 1.05
    config = tree(
        model,
        algorithm={"preset": "chained", "chain": {"cap": cap}},
        algorithm__next_from="trainer",
        runtime__max_concurrent_rollouts=6,
        train__steps=6,
        **SHORT,
    )
    interrupt(go, folder, config, "after step 3")
    kept = read_next_policy(saved_in(folder)[-1].path / NEXT_POLICY)
    assert kept and all((entry.newest >= 0).any() for entry in kept)
    assert go(folder, config, resume=True).status == "done"
    run = RunFolder(folder)
    weights = {0: model} | {c.facts["policy_version"]: c.path / "model" for c in checkpoints(run.checkpoints)}
    stacks = {v: TrainStack(Policy(load(str(path)), compute_dtype=torch.float32)) for v, path in weights.items()}
    steps_taken, bounded = set(), 0
    for step in range(1, 7):
        rows = [row for row in read_rows(run.rollout_file(step)) if row.get("chained_log_ratio") is not None]
        facts = ("prompt_tokens", "tokens", "temperature")
        items = [Trajectory(group=i, **{name: row[name] for name in facts}) for i, row in enumerate(rows)]
        log_probs = {version: stack.log_prob(items) for version, stack in stacks.items() if version < step}
        for i, row in enumerate(rows):
            own, known = np.array(row["policy_version"]), ~np.isnan(np.array(row["next_log_prob"], np.float32))
            for token in known.nonzero()[0]:
                way = [row["behavior_log_prob"][token]]
                way += [float(log_probs[version][i][token]) for version in range(own[token] + 1, step - 1)]
                taken = np.minimum(np.diff(way), np.log(cap))
                assert row["chained_log_ratio"][token] == pytest.approx(taken.sum(), abs=1e-3)
                assert row["next_log_prob"][token] == pytest.approx(way[-1], abs=3e-4)
                steps_taken.add(len(taken))
                bounded += int((np.diff(way) > np.log(cap)).any())
    assert max(steps_taken) >= 2 and bounded
    last = steps_of(folder)[-1]
    assert last["next/missing_fraction"] == 0 and 0 <= last["next/capped_fraction"] <= 1


def test_off_nothing_is_asked_and_nothing_is_kept(tiny_model, tmp_path, monkeypatch):
    from proxima.engine.local.local_engine import LocalEngine

    def never(*arguments, **more):
        raise AssertionError

    for name in ("in_flight", "score"):
        monkeypatch.setattr(LocalEngine, name, never)
    for name in ("__init__", "fill", "before_pause"):
        monkeypatch.setattr(NextPolicy, name, never)
    folder = tmp_path / "run"
    assert go(folder, tree(tiny_model("llama"), algorithm={"preset": "decoupled"}, train__steps=2)).status == "done"
    assert not list(folder.rglob(NEXT_POLICY))
    assert all(row["next_log_prob"] is None for row in rollouts_of(folder, 2))
    assert not any(name.startswith("next/") for record in steps_of(folder) for name in record)


def test_missing_ones_are_counted_and_handled(tiny_model, tmp_path, monkeypatch):
    """The hook never writes, as if every window was missed."""

    async def nothing(self):
        await asyncio.sleep(0)

    monkeypatch.setattr(NextPolicy, "before_pause", nothing)
    model = tiny_model("llama")
    for missing in ("decoupled", "drop_token", "drop_sample"):
        folder = tmp_path / missing
        assert go(folder, tree(model, algorithm__next_missing=missing, **SHORT, train__steps=3)).status == "done"
        assert any(r["next/missing_fraction"] > 0 for r in steps_of(folder))
        for record in steps_of(folder):
            assert record["next/cached_fraction"] == 0
            rejected, lost = record["correction/rejected_fraction"], record["next/missing_fraction"]
            if missing == "drop_token":
                assert rejected >= lost * 0.99  # loss tokens that are skipped with a zero advantage are in neither
