"""Cells, their means and intervals, the cost of a target, and what is said where a comparison is not fair."""

import json
import math

import pytest

from proxima.experiments.cell_statistics import HELD_OUT
from proxima.experiments.run_comparison import compare_runs
from proxima.view.comparison_page import page_values
from tests.experiments.runs import CONFIG, answered, comparison, curve, make_run, make_sweep, step
from tests.refusals import refused


@pytest.fixture
def two(tmp_path):
    """grpo and cppo, three seeds each; cppo takes half the time a step, and its seed 3 is a tenth better."""
    cells = {
        "grpo": {s: (curve([0.1, 0.5, 0.9], seconds=4.0, reward=0.2), {}) for s in (1, 2, 3)},
        "cppo": {s: (curve([0.1, 0.5, 0.9 + (s == 3) * 0.1], reward=0.1 * s), {}) for s in (1, 2, 3)},
    }
    return make_sweep(tmp_path / "s", cells)


def test_runs_that_differ_in_the_seed_are_one_cell(two):
    result = comparison(two)
    assert [(cell.name, [run.seed for run in cell.runs]) for cell in result.cells] == [
        ("grpo", [1, 2, 3]),
        ("cppo", [1, 2, 3]),
    ]
    assert result.baseline.name == "grpo"
    assert result.differing == {"algorithm.surrogate.kind": ("grpo", "cppo")}
    assert (result.warnings, result.notes) == ((), ())
    assert result.axes == ("step", "generated", "trained", "time")


def test_the_final_table(two):
    grpo, cppo = comparison(two, target=0.8).rows()
    assert (grpo.n, grpo.runs, grpo.after.half) == (3, 3, 0.0)
    assert (grpo.before.mean, grpo.after.mean) == pytest.approx((0.1, 0.9))
    assert cppo.after.mean == pytest.approx(0.9 + 0.1 / 3)
    assert cppo.after.half == pytest.approx(
        4.302653 * math.sqrt(0.01 / 3) / math.sqrt(3), rel=1e-6
    )  # s² of (0, 0, .1) = .00667 / 2
    assert (grpo.clock.mean, grpo.generate.mean, grpo.train.mean, grpo.cpu) == (16.0, 8.0, 4.0, None)
    assert (grpo.generate_rate.mean, grpo.train_rate.mean) == (pytest.approx(50.0), pytest.approx(40.0))
    assert grpo.reach["step"].values == pytest.approx((3.5, 3.5, 3.5))
    assert cppo.reach["step"].values == pytest.approx((3.5, 3.5, 3.2))
    assert (cppo.reach["time"].median, cppo.reach["time"].reached) == (pytest.approx(7.0), 3)
    assert cppo.reach["time"].ratio == pytest.approx(2.0)  # the median of 2, 2, 2.19
    assert grpo.reach["time"].ratio == 1.0
    assert (grpo.difference, set(cppo.difference)) == ({}, {"after", "best", "reward", "clock"})
    assert cppo.difference["after"].mean == pytest.approx(0.1 / 3)
    assert (cppo.difference["clock"].mean, cppo.difference["clock"].half) == (-8.0, 0.0)
    assert cppo.difference["reward"].mean == pytest.approx(0.0)
    assert cppo.difference["reward"].half == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)


def of_pairs(margin, *, questions=9):
    """Two steps of DPO between two evaluations."""
    steps = [
        {"kind": "train", "step": n, "time": 1.0, "examples": 4, "time/step": 1.0, "time/train": 1.0}
        | {"loss": 0.6 - margin, "rewards/margins": margin * n, "rewards/accuracies": 0.75}
        for n in (1, 2)
    ]
    evals = [
        {"kind": "eval", "step": n, "time": 1.0, "examples": 6, "metric": "accuracy", "questions": questions}
        | {"accuracy": 0.5 + margin * n, "loss": 0.7 - margin * n, "rewards/margins": margin * n}
        for n in (0, 2)
    ]
    return [evals[0], *steps, evals[1]]


@pytest.mark.slow
def test_runs_on_a_fixed_data_set_show_figures_of_their_own(tmp_path):
    config = CONFIG.replace("kind: arithmetic ", "kind: {kind} ")
    cells = {
        kind: {s: (of_pairs(m + s / 100), {"config": config}) for s in (1, 2, 3)}
        for kind, m in (("a", 0.1), ("b", 0.2))
    }
    result = comparison(make_sweep(tmp_path / "s", cells))
    margins = ("training margin", "held-out loss", "held-out margin")
    assert result.figures == ("training loss", "training accuracy", *margins)  # held-out accuracy is the headline
    a, b = result.rows()
    assert (a.after.mean, a.reward) == (pytest.approx(0.74), None)
    means = {name: mean.mean for name, mean in a.figures.items()}
    assert means == pytest.approx(dict(zip(result.figures, (0.48, 0.75, 0.24, 0.46, 0.24), strict=True)))
    assert b.difference["held-out margin"].mean == pytest.approx(0.2) and b.difference["training loss"].half < 1e-9
    assert [text for text in result.warnings if "different tasks" in text] == [
        "the cells were trained on different tasks (task.kind): do not compare their training figures"
    ]
    assert result.as_json()["cells"][0]["figures"]["held-out margin"]["n"] == 3
    titles = [chart["title"] for chart in page_values(result)["answers"]["comparison"]["charts"]]
    assert titles == ["held-out accuracy", "loss", "rewards/accuracies", "rewards/margins", "time/step"]
    mixed = make_sweep(tmp_path / "t", {"a": cells["a"], "rl": {1: (curve([0.1, 0.5]), {})}})
    assert comparison(mixed).figures == ()


@pytest.mark.slow
def test_runs_with_environments_show_their_turns(tmp_path):
    played = [step(n, **{"episode/turns/mean": float(n), "episode/calls": 4.0, "episode/failed": 0}) for n in (1, 2)]
    make_sweep(tmp_path / "s", {"grpo": {1: ([step(1), step(2)], {})}, "cppo": {1: (played, {})}})
    result = comparison(tmp_path / "s")
    assert result.figures == ("turns", "calls", "failed") and not result.offline
    grpo, cppo = result.rows()
    assert grpo.figures["turns"] is None and cppo.figures["turns"].mean == 2.0 and cppo.reward.mean == 0.5
    values = page_values(result)
    assert values["head"][5:9] == ["training reward", "turns", "calls", "failed"]
    titles = {chart["title"] for chart in values["answers"]["comparison"]["charts"]}
    assert {"episode/turns/mean", "episode/calls"} <= titles


def test_a_pairing_needs_common_seeds(tmp_path):
    cells = {
        "a": {1: (curve([0.1, 0.5]), {}), 2: (curve([0.1, 0.6]), {})},
        "b": {2: (curve([0.1, 0.9]), {}), 5: (curve([0.1, 0.1]), {})},
    }
    result = comparison(make_sweep(tmp_path / "s", cells))
    assert result.rows()[1].difference["after"].n == 1
    assert result.rows()[1].difference["after"].mean == pytest.approx(0.3)
    cells = {"a": {1: (curve([0.1, 0.5]), {})}, "b": {2: (curve([0.1, 0.9]), {})}}
    assert comparison(make_sweep(tmp_path / "t", cells)).rows()[1].difference == {}


def test_never_is_infinitely_late(tmp_path):
    cells = {
        "a": {1: (curve([0.1, 0.9]), {}), 2: (curve([0.1, 0.2]), {}), 3: (curve([0.1, 0.9]), {})},
        "b": {1: (curve([0.1, 0.2]), {}), 2: (curve([0.1, 0.9]), {}), 3: (curve([0.1, 0.2]), {})},
    }
    a, b = comparison(make_sweep(tmp_path / "s", cells), target=0.9).rows()
    assert (a.reach["step"].median, a.reach["step"].reached) == (2.0, 2)
    assert (b.reach["step"].median, b.reach["step"].reached, b.reach["step"].values) == (None, 1, (None, 2.0, None))
    assert b.reach["step"].ratio == 0.0  # twice never where the baseline got there, once the other way round
    assert comparison(tmp_path / "s", target=0.9, baseline="b").rows()[0].reach["step"].ratio == math.inf
    none = comparison(tmp_path / "s", target=1.0).rows()[1]
    assert (none.reach["step"].median, none.reach["step"].ratio) == (None, None)
    text = json.dumps(comparison(tmp_path / "s", target=0.9, baseline="b").as_json(), allow_nan=False)
    assert json.loads(text)["cells"][0]["reach"]["step"] == {
        "values": [2.0, None, 2.0],
        "median": 2.0,
        "ratio": None,
        "pairs": 3,
        "never": 0,
    }


@pytest.mark.parametrize(
    ("mine", "theirs", "ratio", "never"),
    [
        ("r--", "s--", None, 2),  # one seed of three tells nothing of the median
        ("rsr-", "sss-", None, 1),  # it depends on the fourth
        ("rr-", "ss-", 2.0, 1),
        ("rr--r", "ss--s", 2.0, 2),
        ("r-", "-r", None, 0),  # once infinitely better, once infinitely worse
        ("rr", "s-", None, 0),
        ("---", "---", None, 3),
        ("rrs", "srs", 1.0, 0),
    ],
)
def test_a_ratio_is_over_all_common_seeds(tmp_path, mine, theirs, ratio, never):
    """r: there at step 2; s: at step 4; -: never."""
    curves = {"r": [0.1, 0.9, 0.9], "s": [0.1, 0.1, 0.9], "-": [0.1, 0.2, 0.2]}
    cells = {
        name: {seed: (curve(curves[how]), {}) for seed, how in enumerate(hows, 1)}
        for name, hows in (("a", theirs), ("b", mine))
    }
    reach = comparison(make_sweep(tmp_path / "s", cells), target=0.9).rows()[1].reach["step"]
    assert (reach.ratio, reach.pairs, reach.never) == (ratio, len(mine), never)


def test_a_band_is_mean_and_interval_at_each_step(two):
    grpo, cppo = comparison(two).cells
    band = cppo.band(HELD_OUT, "time")
    assert band.x == (0.0, 4.0, 8.0)
    assert band.mean == pytest.approx((0.1, 0.5, 0.9 + 0.1 / 3))
    assert band.high[2] - band.mean[2] == pytest.approx(0.1434218, rel=1e-6)
    assert band.mean[2] - band.low[2] == pytest.approx(0.1434218, rel=1e-6)
    assert band.low[1] == band.high[1] == pytest.approx(0.5)
    assert grpo.band("reward/mean").mean == pytest.approx((0.2,) * 4)
    assert (grpo.band("nothing"), grpo.band("reward/mean", "cpu")) == (None, None)


def test_places_are_averaged_with_values(tmp_path):
    cells = {"a": {1: (curve([0.1, 0.5], seconds=1.0), {}), 2: (curve([0.2, 0.7], seconds=3.0), {})}}
    band = comparison(make_sweep(tmp_path / "s", cells)).cells[0].band(HELD_OUT, "time")
    assert band.x == (0.0, 4.0) and band.mean == pytest.approx((0.15, 0.6))


def test_a_single_seed_has_no_interval(tmp_path):
    make_run(tmp_path / "one", curve([0.1, 0.5]))
    result = comparison(tmp_path)
    assert result.cells[0].band("reward/mean").low == ()
    assert result.rows()[0].after.half is None


def test_runs_of_different_lengths_and_a_seed_each_are_said(tmp_path):
    make_run(tmp_path / "long", curve([0.1, 0.5, 0.9]))
    make_run(tmp_path / "short", curve([0.1, 0.5]))
    result = comparison(tmp_path)
    assert result.warnings == (
        "the runs have different numbers of steps (long 4, short 2): compare the curves at equal steps",
    )
    assert result.notes == ("one seed per cell: no intervals, and a difference may be chance; run more seeds",)


def test_an_equal_warning_is_reported_once_with_its_runs(tmp_path):
    cells = {name: {s: (curve([0.1, 0.5]), {}) for s in (1, 2)} for name in ("a", "b")}
    folder = make_sweep(tmp_path / "s", cells)
    for run, texts in (
        ("a/seed-1", ["5 % x", "y"]),
        ("a/seed-2", ["6 % x", "y"]),
        ("b/seed-2", ["y"]),
        ("b/seed-1", ["y"]),
    ):
        messages = [{"step": 1, "last": 1, "text": text, "times": 1} for text in texts]
        (folder / run / "summary.json").write_text(json.dumps({"status": "done", "steps": 2, "warnings": messages}))
    assert [note for note in comparison(folder).notes if "report.html" in note] == [
        "a seeds 1 and 2: 5 % x (figures of a seed 1); see report.html",
        "all 4 runs: y; see report.html",
    ]


def test_what_is_not_done_is_left_out_and_said(tmp_path):
    cells = {
        "a": {1: (curve([0.1, 0.5, 0.9]), {}), 2: (curve([0.1, 0.3]), {"status": "stopped", "steps": 4})},
        "b": {1: (curve([0.1, 0.3]), {"status": None, "steps": 4})},
    }
    result = comparison(make_sweep(tmp_path / "s", cells))
    a, b = result.rows()
    assert (a.n, a.runs, a.after.mean) == (1, 2, 0.9)
    assert (b.n, b.runs, b.after.mean) == (1, 1, 0.3)
    assert result.notes == (
        "a seed 2: stopped at step 2 of 4; left out of the means",
        "b seed 1: unfinished at step 2 of 4; included as far as it got",
    )


def test_half_a_run_is_no_pair_and_may_still_get_there(tmp_path):
    half = {"status": None, "steps": 9}
    cells = {
        "a": {1: (curve([0.1, 0.9]), {}), 2: (curve([0.1, 0.9]), {})},
        "b": {1: (curve([0.1, 0.3]), half), 2: (curve([0.1, 0.9]), half)},
        "c": {1: (curve([0.1, 0.3]), half)},
    }
    _, b, c = comparison(make_sweep(tmp_path / "s", cells), target=0.9).rows()
    reach = b.reach["step"]
    assert (b.difference, reach.values, reach.median, reach.ratio) == ({}, (2.0,), 2.0, None)
    assert (c.reach["step"].values, c.reach["step"].median) == ((), None)


def test_no_accuracy_is_said_and_is_no_number(tmp_path):
    make_run(tmp_path / "a", [step(1), answered(1, None)])
    result = comparison(tmp_path, target=0.5)
    assert result.notes == ("a: no held-out accuracy; --metric reward compares the mean rewards",)
    row = result.rows()[0]
    assert (row.before, row.after, row.best, row.reach["step"].median) == (None, None, None, None)


def test_unfair_comparisons_are_said(tmp_path):
    make_run(tmp_path / "a", curve([0.1, 0.5]))
    make_run(
        tmp_path / "b",
        curve([0.1, 0.5]),
        config=CONFIG.replace("kind: arithmetic", "kind: gsm8k").replace("limit: 100", "limit: 50"),
    )
    (tmp_path / "a" / "environment.json").write_text('{"machine": {"processor": "X"}, "torch": {"threads": 1}}')
    (tmp_path / "b" / "environment.json").write_text('{"machine": {"processor": "X"}, "torch": {"threads": 2}}')
    assert comparison(tmp_path).warnings == (
        "the cells were trained on different tasks (task.kind): do not compare their rewards",
        "the cells were evaluated on different questions (eval.limit): do not compare their held-out results",
        "the runs used different machines or thread counts (X, 1 threads; X, 2 threads): compare steps, not times",
    )
    make_run(tmp_path / "c", [step(1), answered(1, 0.5, questions=40)], kind="grpo")
    assert any(
        "(numbers of questions: 100, 40)" in text or "eval.limit" in text for text in comparison(tmp_path).warnings
    )


def test_a_seed_twice_is_said(tmp_path):
    for name in "ab":
        make_run(tmp_path / name, curve([0.1, 0.5]), kind="cppo", seed=1)
    result = comparison(tmp_path)
    assert [len(cell.runs) for cell in result.cells] == [2]
    assert result.warnings == ("a seed more than once (a): the interval treats repetitions as independent seeds",)


def test_names_set_the_cells_apart(tmp_path):
    for seed in (1, 2):
        for kind in ("grpo", "cppo"):
            make_run(tmp_path / f"{kind}-{seed}", [step(1)], kind=kind, seed=seed)
    assert sorted(cell.name for cell in comparison(tmp_path).cells) == ["surrogate=cppo", "surrogate=grpo"]
    make_run(tmp_path / "x" / "run", [step(1)], kind="dppo")
    make_run(tmp_path / "y" / "run", [step(1)], kind="drpo")
    assert {cell.name for cell in comparison(tmp_path).cells} >= {"run surrogate=dppo", "run surrogate=drpo"}


def test_wrong_questions(two):
    assert refused(comparison, two, baseline="cpo") == ["baseline=cpo is not a cell; did you mean 'cppo'?"]
    assert refused(comparison, two, target=90) == ["target=90 must be a held-out accuracy in (0, 1]"]
    assert "no runs to compare" in refused(compare_runs, [])[0]


def test_a_run_before_its_first_step_takes_no_axis_from_the_others(two):
    make_run(two / "dppo" / "seed-1", [answered(0, 0.1, "before")], kind="dppo", status=None, steps=4)
    result = comparison(two, target=0.8)
    assert result.axes == ("step", "generated", "trained", "time")
    assert result.cells[2].band(HELD_OUT, "time").x == (0.0,)
