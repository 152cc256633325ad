"""Runs in which pruning stops completions: what they record, and that the update is that of a run that waits."""

import pytest

from proxima.data.flow import STOPPED
from tests.runtime.tiny_run import rollouts_of, steps_of, traces

pytestmark = pytest.mark.slow


def test_what_is_stopped_is_counted_and_stored(runs):
    folder = runs.finished("stopped completions")
    counted = 0
    for record in steps_of(folder):
        rows = rollouts_of(folder, record["step"])
        stopped = [row for row in rows if row["error"] == STOPPED]
        counted += len(stopped)
        assert record.get("stopped", 0) == len(stopped) and record["reward/invalid"] == 0
        assert record.get("tokens/stopped", 0) == sum(len(row["tokens"]) for row in stopped)
        assert {row["outcome"] for row in stopped} <= {"dropped_pruned"}
        assert sum(row["outcome"] == "dropped_pruned" for row in rows) == record["dropped/pruned"]
    assert counted


def test_by_a_greedy_baseline_the_update_is_that_of_a_run_that_waits(runs, tmp_path):
    """Exact, `remax`: the same weights, from fewer tokens."""
    prune = {"kind": "prune", "rate": 0.875, "reward_range": [0, 1]}
    folders = {}
    for stop in (True, False):
        folders[stop] = tmp_path / str(stop)
        selection = [prune | {"stop": stop}]
        runs.go("stopped completions", folders[stop], algorithm__advantage="remax", algorithm__selection=selection)
    assert sum(record.get("stopped", 0) for record in steps_of(folders[True]))
    for stopping, waiting in zip(steps_of(folders[True]), steps_of(folders[False]), strict=True):
        assert stopping["loss"] == waiting["loss"] and stopping["grad_norm"] == waiting["grad_norm"]
        assert stopping["tokens/generated"] <= waiting["tokens/generated"]
    stopping, waiting = traces(folders[True])["tensors"], traces(folders[False])["tensors"]
    assert stopping == waiting and stopping
