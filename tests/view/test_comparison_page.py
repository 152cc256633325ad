"""compare.html: its figures are those of the comparison, it asks nothing of the network, foreign text stays text."""

import math

import pytest

from proxima.data import UserError
from proxima.experiments.cell_statistics import HELD_OUT, SeedBand
from proxima.view.comparison_page import (
    config_value,
    interval_bars,
    page_values,
    visible_range,
    widened,
    write_comparison,
)
from tests.experiments.runs import CONFIG, comparison, curve, make_run, make_sweep
from tests.view.test_report import Page, assert_asks_for_nothing


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    cells = {
        "grpo": {s: (curve([0.1, 0.5, 0.9], seconds=4.0, reward=0.2, **{"time/cpu": 6.0}), {}) for s in (1, 2, 3)},
        "cppo": {s: (curve([0.1, 0.5, 0.9 + (s == 3) * 0.1], reward=0.1 * s, **{"time/cpu": 2.0}), {}) for s in (1, 2)},
    }
    return comparison(make_sweep(tmp_path_factory.mktemp("s"), cells), target=0.8)


@pytest.fixture(scope="module")
def page(two, tmp_path_factory):
    return Page(write_comparison(two, tmp_path_factory.mktemp("page") / "c.html", title="mine"))


def charts_of(comparison, over=None):
    """Title → chart, as the page's script gets them."""
    charts = page_values(comparison, over)["answers"]["comparison"]["charts"]
    return {chart["title"]: chart for chart in charts}


@pytest.mark.slow
def test_the_page_shows_the_numbers(two, page):
    assert page.open == []
    assert "2 cells 5 runs baseline grpo target accuracy 0.8" in page.words
    assert (
        "grpo 3 0.100 ± 0.000 0.900 ± 0.000 0.900 ± 0.000 0.200 ± 0.000 3.5 350 14 s 21 s 16 s 8.0 s + 4.0 s 50, 40"
        in page.words
    )
    assert (
        "cppo 2 0.100 ± 0.000 0.900 ± 0.000 0.900 ± 0.000 0.150 ± 0.635 3.5 350 7.0 s (2.00 ×) 7.0 s (3.00 ×) 8.0 s"
        in page.words
    )
    assert "cppo 2 +0.000 ± 0.000 +0.000 ± 0.000 −0.050 ± 0.635 −8.0 ± 0.0 s −16.0 ± 0.0 s" in page.words
    assert "algorithm.surrogate.kind grpo cppo" in page.words
    (note,) = two.notes
    assert note.startswith("2 seeds (cppo) are too few: their 95 % intervals are very wide, ± 9.0 standard deviations")
    assert "against ± 1.6 with 4 seeds" in note and f"Notes {note}" in page.words


@pytest.mark.slow
def test_the_page_asks_nothing_of_the_network_and_runs_its_own_script_only(page):
    assert_asks_for_nothing(page)


@pytest.mark.slow
def test_foreign_text_stays_text(tmp_path):
    hostile = "<script>alert(1)</script>"
    config = CONFIG.replace("path: models/m", f"path: '{hostile}'")
    make_run(tmp_path / "r" / "a<b>&", curve([0.1, 0.5]), config=config, status=None)
    make_run(tmp_path / "r" / "c", curve([0.1, 0.5]))
    page = Page(write_comparison(comparison(tmp_path / "r"), tmp_path / "c.html", title=hostile))
    assert page.tags.count("script") == page.source.count("<script") == 2
    assert "a<b>&" in page.words and hostile in page.words
    assert "a<b>&" in [cell["name"] for cell in page.data["comparison"]["cells"]]


def test_the_data_of_the_curves(two, page):
    data = page.data["comparison"]
    assert [axis["key"] for axis in data["axes"]] == ["step", "time", "cpu", "generated", "trained"]
    charts = {chart["title"]: chart for chart in data["charts"]}
    assert set(charts) == {"held-out accuracy", "reward/mean", "length/mean", "time/step"}  # nothing else was recorded
    held = charts["held-out accuracy"]
    assert held["dots"] and held["target"] == 0.8 and set(held["lines"]) == {axis["key"] for axis in data["axes"]}
    grpo = {"x": [0.0, 8.0, 16.0], "mean": [0.1, 0.5, 0.9], "low": [0.1, 0.5, 0.9], "high": [0.1, 0.5, 0.9]}
    assert held["lines"]["time"][0] == grpo and held["lines"]["time"][1]["x"] == [0.0, 4.0, 8.0]
    reward = charts["reward/mean"]
    assert reward["target"] is None and not reward["dots"]
    assert reward["explanation"] == "mean over the valid completions generated in the step, trained or not"


@pytest.mark.slow
def test_the_ninth_cell_has_the_first_colour_dashed(tmp_path):
    cells = {f"c{i}": {1: (curve([0.1, 0.5], every=1), {})} for i in range(10)}
    legend = page_values(comparison(make_sweep(tmp_path / "s", cells)))["cells"]
    assert [cell["look"] for cell in legend[7:]] == ["k7", "k0 again", "k1 again"]
    assert len({cell["look"] for cell in legend}) == 10


def test_wide_areas_do_not_flatten_the_lines(two):
    wide = SeedBand(x=(1.0,), mean=(0.15,), low=(-0.5,), high=(0.8,), n=3)
    low, high = visible_range([two.cells[0].band("reward/mean"), wide], 1.0)
    assert (low, high) == pytest.approx((0.15 - 0.05 / 3, 0.2 + 0.05 / 3))
    assert visible_range([two.cells[0].band(HELD_OUT)], 1.0) == pytest.approx((0.0, 1.0))


def test_two_seeds_are_drawn_as_the_two(tmp_path):
    """Their intervals, ± 0.127 and ± 1.9, would flatten every curve and squeeze every bar."""
    cells = {
        "a": {s: (curve([0.1, 0.4 + 0.02 * s], reward=0.1 * s), {}) for s in (1, 2)},
        "b": {s: (curve([0.1, 0.6 - 0.02 * s], reward=0.3), {}) for s in (1, 2)},
    }
    result = comparison(make_sweep(tmp_path / "s", cells))
    band = result.cells[0].band("reward/mean")
    assert (band.low, band.high, band.mean) == ((0.1,) * 2, (0.2,) * 2, pytest.approx((0.15,) * 2))
    assert visible_range([band], 1.0) == pytest.approx((0.1 - 0.1 / 3, 0.2 + 0.1 / 3))
    intervals = interval_bars(result.rows(), result.headline)
    assert (intervals["low"], intervals["high"]) == ("0.367", "0.633")  # the seeds, .42 … .58, and a third beyond
    first, second = intervals["bars"]
    assert first["seeds"] == pytest.approx([20.0, 27.5]) and first["cut"] == "open-left"
    assert second["seeds"] == pytest.approx([80.0, 72.5]) and second["cut"] == "open-right"


@pytest.mark.slow
def test_where_nothing_is_right_or_wrong_the_mean_reward_is_compared(tmp_path):
    def rewarded(*values):
        records = [r if r["kind"] == "train" else {**r, "accuracy": None} for r in curve([0.0] * len(values))]
        evals = iter(values)
        return [{**r, "reward/mean": next(evals)} if r["kind"] == "eval" else r for r in records]

    cells = {name: {s: (rewarded(-2.0, last * s), {}) for s in (1, 2)} for name, last in (("a", -0.5), ("b", 3.0))}
    result = comparison(make_sweep(tmp_path / "s", cells), target=-1.0)
    assert result.headline.key == "reward/mean" and result.as_json()["metric"] == "reward/mean"
    values = page_values(result)
    assert next(iter(charts_of(result))) == "held-out mean reward"
    assert values["intervals"]["bars"][1]["text"][:5] == "4.500"
    assert values["head"][2:6] == ["reward before", "after", "best", "training reward"]
    assert values["table"][0][2:4] == ["-2.000 ±\u00a00.000", "-0.750 ±\u00a03.177"]
    assert "target mean reward -1" in Page(write_comparison(result, tmp_path / "c.html")).words


def test_a_run_with_nothing_but_an_evaluation(tmp_path):
    make_run(tmp_path / "r" / "a", curve([0.1]), status=None, steps=9)
    page = Page(write_comparison(comparison(tmp_path / "r", target=0.5), tmp_path / "c.html"))
    assert "1 cell 1 run" in page.words and "not yet" in page.words
    assert "never" not in page.words.partition("To target")[0]


@pytest.mark.slow
def test_a_target_that_was_met_before_training_has_no_cost(tmp_path):
    cells = {"a": {1: (curve([0.1, 0.9]), {})}, "b": {1: (curve([0.85, 0.9]), {})}}
    result = comparison(make_sweep(tmp_path / "s", cells), target=0.8)
    costs = [row[6:9] for row in page_values(result)["table"]]
    assert costs[0] == ["1.8", "175", "3.5\u00a0s"] and costs[1] == ["already reached"] * 3  # and no ratio of 0 or ∞
    assert result.rows()[1].reach["step"].ratio is None


@pytest.mark.slow
def test_a_target_that_is_never_reached_has_no_cost(tmp_path):
    cells = {"a": {1: (curve([0.1, 0.9]), {})}, "b": {1: (curve([0.1, 0.2]), {})}}
    result = comparison(make_sweep(tmp_path / "s", cells), target=0.8)
    reached, never = (row[6:9] for row in page_values(result)["table"])
    assert "×" not in "".join(reached) and never == ["never"] * 3
    again = comparison(tmp_path / "s", target=0.8, baseline="b")
    assert page_values(again)["table"][0][8].endswith("(∞\u00a0×)")  # the other way round it is a saving


@pytest.mark.slow
def test_the_axes_do_not_magnify_ties_and_end_where_values_can(tmp_path):
    rates = {"a": (0.9401, 0.9501), "b": (0.9403, 0.9502)}  # accuracy and reward
    cells = {
        name: {
            s: (curve([rate + s / 1e5] * 3, reward=reward, **{"entropy/mean": 0.5 + s / 1e4}), {}) for s in (1, 2, 3)
        }
        for name, (rate, reward) in rates.items()
    }
    result = comparison(make_sweep(tmp_path / "s", cells))
    ends = {title: pytest.approx(chart["ends"]) for title, chart in charts_of(result).items()}
    assert ends["held-out accuracy"] == (0.89022, 0.99022)
    assert ends["reward/mean"] == (0.902638, 0.997662)  # no reward was above 1
    assert ends["entropy/mean"] == (0.47519, 0.52521)
    assert ends["length/mean"] == (7.6, 8.4)
    values = page_values(result)
    assert (values["intervals"]["low"], values["intervals"]["high"]) == ("0.890", "0.990")
    assert widened(0.98, 0.99, 0.1, 1.0) == pytest.approx((0.9, 1.0)) and widened(0.0, 0.01, 0.1, 1.0) == (0.0, 0.1)
    assert widened(-1.0, 1.0, 0.1, math.inf) == (-1.0, 1.0)


@pytest.mark.slow
def test_no_table_is_cut_off(page):
    """No table scrolls sideways, and on a phone each value has its label."""
    assert page.tags.count("table") == 3
    assert not [value for _, name, value in page.attributes if name == "class" and "scroll" in value]
    labels = [value for _, name, value in page.attributes if name == "data-label"]
    assert [labels.count(name) for name in ("seeds", "clock to target (×)", "common seeds", "cppo")] == [2, 2, 1, 1]


def test_values_in_a_line():
    assert [config_value(v) for v in (None, 1e-5, 0.15, True, "a: b", [])] == [
        "–",
        "1e-5",
        "0.15",
        "true",
        "'a: b'",
        "[]",
    ]


def test_what_cells_reach_and_take_over_a_field(tmp_path):
    def cell(size, end):
        config = CONFIG.replace("1.0e-05", str(size))
        return {s: (curve([0.1, end], seconds=60.0 * size), {"config": config}) for s in (1, 2)}

    cells = comparison(make_sweep(tmp_path, {"g16": cell(16, 0.8), "g4": cell(4, 0.6)}))
    charts = page_values(cells, "train.optimizer.lr")["answers"]["comparison"]["charts"]
    reached, clock = (chart for chart in charts if chart.get("over") == "train.optimizer.lr")
    points = [[(dot["x"], dot["mean"]) for dot in chart["lines"]["only"]] for chart in (reached, clock)]
    assert [reached["title"], clock["title"]] == ["held-out accuracy", "training clock, s"]
    assert points == [[((16.0,), (0.8,)), ((4.0,), (0.6,))], [((16.0,), (1920.0,)), ((4.0,), (480.0,))]]
    with pytest.raises(UserError, match="--over seed: must be a number in the recipe, and differ"):
        page_values(cells, "seed")
