"""Results of sweeps: what a line says, differences by seed and their verdicts, and the reports of the claims."""

import importlib
import json
from types import SimpleNamespace

import pytest

from evidence import curves
from proxima.experiments.sweep_file import read_sweep
from tests.experiments.runs import answered, make_run, step

CLAIMS = {
    "pruning": ["sweep", "more", "equal"],
    "dapo": ["sweep", "known"],
    "cppo": ["lengths", "controls", "rates"],
    "mismatch": ["sweep", "controls", "int8"],
    "segments": ["sweep", "learning"],
    "trl": ["sweep", "more"],
}


def run_of(cell, seed, rewards, **more):
    filled = {name: [0.5] * len(rewards) for name in curves.CURVES}
    return {"cell": cell, "seed": seed, "after": 0.5, **filled, "reward": rewards, **more}


def test_a_line_has_every_step_of_a_run(tmp_path):
    records = [step(1, 0.123456), answered(1, 0.25), {"kind": "train", "step": 2}]
    make_run(tmp_path / "a" / "seed-2", records, seed=2, eval={"after": {"accuracy": 0.25}})
    (line,) = curves.results_of(tmp_path, "s")
    assert (line["sweep"], line["cell"], line["seed"], line["status"], line["after"]) == ("s", "a", 2, "done", 0.25)
    assert line["reward"] == [0.12346, None]


def test_results_of_runs_that_are_not_here_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    codes = iter([1, 2])  # a run failed; nothing could be run
    monkeypatch.setattr(curves.subprocess, "run", lambda *_: SimpleNamespace(returncode=next(codes)))
    earlier, again = ({"sweep": "s", "cell": cell, "seed": 1, "reward": [0.1]} for cell in "ab")
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (earlier, again)))
    new = {**again, "reward": [0.2]}
    monkeypatch.setattr(curves, "results_of", lambda folder, name: [new])
    curves.sweep(tmp_path, "s")
    assert curves.read(tmp_path) == [earlier, new]
    with pytest.raises(SystemExit, match="2"):
        curves.sweep(tmp_path, "s")


def test_differences_are_of_the_same_seed():
    runs = [run_of("a", 1, [1.0, 0.5]), run_of("a", 2, [0.5, 0.5]), run_of("b", 2, [0.0]), run_of("b", 3, [1.0])]
    found = curves.difference(runs, "a", "b", curves.mean("reward", 2))
    assert (found.mean, found.n) == (0.5, 1)
    assert curves.mean("reward", 2, last=1)(runs[0]) == 0.5
    assert curves.mean("reward", 4)(run_of("a", 1, [1.0, None, 1.0])) == 0.5  # the last step was not reached


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.1, 0.11, 0.12], "above"),
        ([-0.1, -0.11, -0.12], "below"),
        ([0.001, -0.001, 0.002], "the same"),
        ([0.010, 0.011, 0.012], "above, but by less than the margin"),
        ([0.1, -0.1, 0.02], "can't be told; 222 seeds like these would tell"),
    ],
)
def test_what_an_interval_says(values, verdict):
    assert curves.told(curves.mean_over_seeds(values), 0.02).endswith(f"of 3 seeds): {verdict}")


@pytest.mark.parametrize("claim", CLAIMS)
def test_every_cell_of_a_claim_is_reported(claim, capsys, monkeypatch):
    module, saved = importlib.import_module(f"evidence.{claim}.__main__"), []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: saved.append(file))
    sweeps = {name: read_sweep(f"evidence/{claim}/{name}.yaml") for name in CLAIMS[claim]}
    runs = [
        run_of(cell.name, seed, [0.5 + seed / 100] * 30, sweep=name)
        for name, read in sweeps.items()
        for cell in read.all_cells
        for seed in (1, 2, 6, 7)
    ]
    module.report(runs)
    assert len(saved) == 1
    out = capsys.readouterr().out
    assert "not measured" not in out and "–" not in out.replace(" – ", "")
    assert len(out.splitlines()) > 8
