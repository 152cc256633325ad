"""proxima sweep, as a user types it; the runs are real ones of a tiny model."""

import json

import pyarrow.parquet as parquet
import pytest

from proxima.config.resolved import dump
from proxima.experiments.sweep_file import read_sweep
from proxima.experiments.sweep_plan import plan_runs
from proxima.experiments.sweep_runner import train_command

SWEEP = """\
recipe: tiny.yaml
seeds: [1, 2]
jobs: 2
set: {train.steps: 1, algorithm.advantage: {kind: grpo, scale: none}}
grid: {algorithm: [reinforce, cppo]}
"""


@pytest.fixture
def sweep(recipe, here):
    recipe()
    (here / "mine.yaml").write_text(SWEEP)
    return here / "runs" / "mine"


def test_dry_run_shows_the_commands_and_runs_nothing(proxima, sweep):
    code, out, err = proxima(
        "sweep", "mine.yaml", "--dry-run", "--only", "*cppo", "--folder", "elsewhere", "--jobs", "1"
    )
    assert (code, err) == (0, "")
    head, _, name, command, *rest = out.splitlines()
    assert head == "1 cell × 2 seeds = 2 runs in elsewhere, 1 at a time"
    assert name == "algorithm=cppo seed 1" and rest[0] == "algorithm=cppo seed 2"
    assert command.startswith("    proxima train tiny.yaml ") and command.endswith(" --resume")
    assert "seed=1 'folder=\"elsewhere/algorithm=cppo/seed-1\"'" in command
    assert not sweep.exists()


def test_a_sweep_of_another_folder_is_reported_with_plain_paths(done, proxima, sweep, here):
    """No `mine/../tiny.yaml`, and no `sweep sweep`."""
    (here / "study").mkdir()
    (here / "study" / "sweep.yaml").write_text("recipe: ../tiny.yaml\n")
    out = done("sweep", "study/sweep.yaml", "--dry-run")
    assert "proxima train tiny.yaml " in out and ".." not in out

    from proxima.view.sweep_progress import opening

    assert opening(read_sweep("study/sweep.yaml"), []).startswith("sweep study  1 cell × 1 seed")
    assert opening(read_sweep("study/sweep.yaml", folder="runs/other"), []).startswith("sweep other  ")
    assert opening(read_sweep("mine.yaml"), []).startswith("sweep mine  ")


def test_faults_are_lines_and_nothing_runs(proxima, sweep, here):
    (here / "mine.yaml").write_text(SWEEP + "cells: {a: {train.step: 1}, b: {algorithm.advantage.kind: grop}}\n")
    code, out, err = proxima("sweep", "mine.yaml")
    assert (code, out) == (2, "")
    assert "'train' has no field 'step'; did you mean 'steps'?" in err and "did you mean 'grpo'?" in err
    assert all(line.startswith("error: cells ") for line in err.splitlines())
    assert not sweep.exists()


def first_step(run):
    rows = parquet.read_table(run / "rollouts" / "000001.parquet").to_pylist()
    return {(r["prompt_uid"], r["sample"]): (r["question"], r["tokens"], r["sampled_log_prob"]) for r in rows}


@pytest.mark.slow
def test_the_runs_of_a_sweep_are_paired_compared_and_done_once(done, proxima, sweep, here):
    for run in plan_runs(read_sweep("mine.yaml")):  # by the sweep's own commands, without a new interpreter for each
        run.folder.mkdir(parents=True)
        run.file.write_text(dump(run.resolved))
        assert proxima(*train_command(run)[3:])[0] == 0
    runs = {
        (name, seed): sweep / f"algorithm={name}" / f"seed-{seed}" for name in ("reinforce", "cppo") for seed in (1, 2)
    }
    for (_, seed), run in runs.items():
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["status"], summary["steps"], summary["seed"]) == ("done", 1, seed)
    # paired: another algorithm, the same prompts and the same completions to the bit, as long as the policies are the
    # same
    assert len(first_step(runs["cppo", 1])) == 4
    for seed in (1, 2):
        assert first_step(runs["cppo", seed]) == first_step(runs["reinforce", seed])
    assert first_step(runs["cppo", 1]) != first_step(runs["cppo", 2])
    before = {run: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs.values()}
    code, out, err = proxima("sweep", "mine.yaml", "--jobs", "1")
    assert (code, err) == (0, "") and "4 done before" in out and "4/4 done" in out
    table, page = out.split("\n\n")[1], out.splitlines()[-1]
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [
        ["algorithm=reinforce", "2"],
        ["algorithm=cppo", "2"],
    ]
    assert page == "runs/mine/compare.html" and (sweep / "compare.html").is_file()
    assert before == {run: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs.values()}


@pytest.mark.slow
def test_processes_side_by_side_of_which_one_fails(proxima, sweep, here, warm_processes):
    # a config that passes every check and dies in the run: its folder is a file
    (here / "mine.yaml").write_text(SWEEP.replace("[1, 2]", "[1]"))
    (sweep / "algorithm=reinforce" / "seed-1").mkdir(parents=True)
    (sweep / "algorithm=reinforce" / "seed-1" / "rollouts").write_text("in the way")
    code, out, _ = proxima("sweep", "mine.yaml")
    assert code == 1
    assert "failed   algorithm=reinforce seed 1  exit code 2: " in out
    assert "done     algorithm=cppo seed 1  step 1/1" in out and "1/2 done, 1 failed" in out
    summary = json.loads((sweep / "algorithm=cppo" / "seed-1" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("done", 1)
    assert "failed   algorithm=reinforce seed 1" in (sweep / "log.txt").read_text()
