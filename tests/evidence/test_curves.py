"""Results of sweeps: what a line says, differences by seed and their verdicts, and the reports of the claims."""

import importlib
import json
import random
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
        ([0.1, -0.1, 0.02], "can't be told; 601 seeds like these would tell with a power of 80 %"),
    ],
)
def test_what_an_interval_says(values, verdict):
    assert curves.told(curves.mean_over_seeds(values), 0.02).endswith(f"of 3 seeds): {verdict}")


def test_seeds_that_would_tell_do_so_in_four_of_five_repetitions():
    """Of a mean of .805 deviations, as C1 of `cppo` has: 15, where the half-width equals the mean at 9; and of
    a mean of 0 within a margin of one deviation."""
    found = curves.mean_over_seeds([(-1) ** i + 0.86 for i in range(8)])
    assert curves.needed(found, 0.0) == 15
    inside = curves.mean_over_seeds([(-1) ** i for i in range(8)])
    assert curves.needed(inside, 1.069) == 13
    generator, told = random.Random(1), {"apart": 0, "within": 0}
    for _ in range(2000):
        apart = curves.mean_over_seeds([generator.gauss(0.86, 1.069) for _ in range(15)])
        within = curves.mean_over_seeds([generator.gauss(0.0, 1.069) for _ in range(13)])
        told["apart"] += apart.low > 0
        told["within"] += max(-within.low, within.high) < 1.069
    assert 0.77 < told["apart"] / 2000 < 0.84 and 0.77 < told["within"] / 2000 < 0.88


def test_a_second_look_has_a_wider_interval():
    found = curves.mean_over_seeds([0.1, 0.2, 0.3, 0.4])
    assert curves.at_look(found, 1).half == pytest.approx(found.half)
    third = curves.at_look(found, 3)
    assert third.half / found.half == pytest.approx(4.857 / 3.182, rel=1e-3), "t of 3 at .99167 and at .975"
    assert third.values == found.values


@pytest.mark.slow
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
