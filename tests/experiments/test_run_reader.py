"""A run read back: axes, curves, where a target is reached, and what can't be read."""

import json

import pytest

from proxima.experiments.cell_statistics import first_reach
from proxima.experiments.run_reader import find_runs, read_run
from tests.experiments.runs import answered, curve, make_run, make_sweep, step
from tests.refusals import refused


def test_a_run_is_what_its_folder_says(tmp_path):
    run = read_run(make_run(tmp_path / "a", curve([0.1, 0.5], seconds=3.0), kind="grpo", seed=7))
    assert (run.seed, run.status, run.steps) == (7, "done", 2)
    assert run.config["algorithm.surrogate.kind"] == "grpo"
    assert run.config["train.optimizer.lr"] == 1e-5
    assert run.curve("reward/mean", "time") == [(3.0, 0.5), (6.0, 0.5)]
    assert run.held_out("generated") == [(0.0, 0.1), (200.0, 0.5)]
    assert run.total("time/step") == 6.0
    assert run.tokens_per_second == {"generate": pytest.approx(200 / 3), "train": pytest.approx(160 / 3)}
    assert run.total("nothing") is None


def test_an_engine_beside_the_trainer_generates_during_whole_steps(tmp_path):
    seconds = {"tokens/generated": 600, "time/step": 6.0, "time/generate": 1.0}
    run = read_run(make_run(tmp_path / "a", [step(1, **seconds, **{"idle/engine": 0.0})]))
    assert run.tokens_per_second["generate"] == 100.0


def test_axes_are_there_when_every_step_recorded_them(tmp_path):
    run = read_run(make_run(tmp_path / "a", [step(1, **{"time/cpu": 5.0}), step(2)]))
    assert run.has("time") and not run.has("cpu")
    both = read_run(make_run(tmp_path / "b", [step(1, **{"time/cpu": 5.0}), step(2, **{"time/cpu": 6.0})]))
    assert both.position("cpu") == {0: 0.0, 1: 5.0, 2: 11.0}


def test_the_last_evaluation_of_a_step_counts(tmp_path):
    records = [step(1), answered(1, 0.3), answered(1, 0.4, "after"), answered(0, None, "before")]
    assert read_run(make_run(tmp_path / "a", records)).held_out() == [(1.0, 0.4)]


@pytest.mark.parametrize(
    ("accuracies", "target", "steps"),
    [
        ([0.1, 0.5, 0.9], 0.7, 3.0),  # half way between the evaluations at 2 and 4
        ([0.1, 0.5, 0.9], 0.5, 2.0),
        ([0.1, 0.5, 0.9], 0.95, None),
        ([0.6, 0.2, 0.9], 0.5, 0.0),
        ([0.1, 0.8, 0.2, 0.9], 0.85, 2 * (2 + 0.65 / 0.7)),
        ([0.1, 0.9, 0.2, 0.9], 0.5, 1.0),  # the first time counts
    ],
)
def test_where_the_target_is_reached(tmp_path, accuracies, target, steps):
    run = read_run(make_run(tmp_path / "a", curve(accuracies, seconds=3.0)))
    assert first_reach(run, target) == (None if steps is None else pytest.approx(steps))
    assert first_reach(run, target, "time") == (None if steps is None else pytest.approx(3 * steps))


def test_a_run_that_continues(tmp_path):
    folder = make_run(tmp_path / "a", [step(1)], status=None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert (read_run(folder).status, read_run(folder).steps) == ("unfinished", 1)


def test_what_is_no_run_is_said(tmp_path):
    (line,) = refused(read_run, tmp_path / "empty")
    assert line.endswith("empty is not a run; give the folder that `proxima train` printed")
    (line,) = refused(read_run, make_run(tmp_path / "a", []))
    assert line.endswith("a has no metrics; it has not finished a step or an evaluation yet")
    damaged = make_run(tmp_path / "b", [step(1)])
    (damaged / "summary.json").write_text("{")
    (line,) = refused(read_run, damaged)
    assert "b/summary.json can't be read " in line and "restore it, or delete it to continue without it" in line
    (damaged / "summary.json").unlink()
    (damaged / "config.yaml").write_text("a: [")
    (line,) = refused(read_run, damaged)
    assert "config.yaml" in line and "not YAML" in line and "restore the file, or delete it" in line
    (damaged / "config.yaml").unlink()
    assert (read_run(damaged).config, read_run(damaged).seed) == ({}, None)
    (damaged / "summary.json").write_text('{"seed": 3}')
    assert read_run(damaged).seed == 3


def test_runs_are_found_in_folders_sweeps_and_patterns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = [step(1)]
    cells = {"z": {1: (records, {}), 10: (records, {}), 2: (records, {})}, "b": {1: (records, {})}}
    make_sweep(tmp_path / "sweep", cells)
    make_run(tmp_path / "single", records)
    first, second, tenth, other = (f"sweep/{name}" for name in ("z/seed-1", "z/seed-2", "z/seed-10", "b/seed-1"))
    assert list(map(str, find_runs(["sweep"]))) == [first, tenth, second, other]  # as it lists them
    (tmp_path / "sweep" / "sweep.json").unlink()
    assert list(map(str, find_runs(["sweep"]))) == [other, first, second, tenth]
    assert list(map(str, find_runs(["sing*", "single", "sweep/*/seed-1"]))) == ["single", other, first]
    (tmp_path / "nothing").mkdir()
    for words, said in (
        (["single", "swep"], "swep does not exist; did you mean 'sweep'?"),
        (["nothing"], "nothing and the folders below contain no run"),
        (["none*"], "none* does not exist; give run folders"),
    ):
        (line,) = refused(find_runs, words)
        assert line.startswith(said)


def test_a_whole_disk_is_not_searched(tmp_path, monkeypatch):
    monkeypatch.setattr("proxima.experiments.run_reader.MOST_FOLDERS", 5)
    for i in range(6):
        (tmp_path / str(i)).mkdir()
    (line,) = refused(find_runs, [tmp_path])
    assert line.endswith("has more than 5 folders below it; give run folders, or a sweep's folder")


def test_only_runs_and_sweeps_are_suggested(tmp_path, monkeypatch):
    """Not `known: bin, boot, dev` of the root folder."""
    for name in ("bin", "boot"):
        (tmp_path / name).mkdir()
    (line,) = refused(find_runs, [tmp_path / "nope"])
    assert line.endswith("nope does not exist; give run folders, a sweep's folder, or a pattern in quotes")
    make_run(tmp_path / "mine", [step(1)])
    (line,) = refused(find_runs, [tmp_path / "nope"])
    assert "nope does not exist; known: " in line and line.endswith("/mine")


def test_a_listed_run_that_is_not_there_yet(tmp_path):
    make_sweep(tmp_path / "s", {"a": {1: ([step(1)], {})}})
    facts = json.loads((tmp_path / "s" / "sweep.json").read_text())
    facts["runs"].insert(0, {"cell": "b", "seed": 1, "folder": "b/seed-1"})
    (tmp_path / "s" / "sweep.json").write_text(json.dumps(facts))
    assert find_runs([tmp_path / "s"]) == [tmp_path / "s" / "a" / "seed-1"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", "2"),
        ("seconds", {}),
        ("warnings", {"text": "x"}),
        ("warnings", [1]),
        ("eval", {"after": 5}),
        ("seed", []),
    ],
)
def test_a_summary_of_other_types_is_one_line(tmp_path, field, value):
    run = make_run(tmp_path / "r", curve([0.1, 0.5]))
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {field: value}))
    (line,) = refused(read_run, run)
    assert line.startswith(f"{run}/summary.json has {value!r} for {field}; restore it, or delete it")


@pytest.mark.parametrize("runs", [5, [5], ["seed-1"], [{}], "[" * 5000, {"folder": "x"}])
def test_a_damaged_list_of_a_sweep_is_one_line(tmp_path, runs):
    make_run(tmp_path / "s" / "r", curve([0.1, 0.5]))
    (tmp_path / "s" / "sweep.json").write_text(runs if runs == "[" * 5000 else json.dumps({"runs": runs}))
    (line,) = refused(find_runs, [tmp_path / "s"])
    assert line.startswith(f"{tmp_path}/s/sweep.json can't be read (")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"kind": "train"}, "has no kind and step"),
        ({"kind": 5, "step": 1}, "has no kind and step"),
        ({"kind": "train", "step": -1}, "has no kind and step"),
        ({"kind": "train", "step": True}, "has no kind and step"),
        ({"kind": "train", "step": 1, "reward/mean": "x"}, "has 'x' for reward/mean, expected a number"),
        ({"kind": "eval", "step": 1, "accuracy": [1]}, "has [1] for accuracy, expected a number"),
        ({"kind": "train", "step": 1, "time": {}}, "has {} for time, expected a number"),
    ],
)
def test_a_line_that_no_run_writes_is_named(tmp_path, line, said):
    run = make_run(tmp_path / "r", curve([0.1, 0.5]))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    number = len((run / "metrics.jsonl").read_text().splitlines())
    assert refused(read_run, run) == [f"{run}/metrics.jsonl:{number} {said}; restore the file or delete the line"]
