"""proxima compare, as a user types it."""

import csv
import json

import pytest

from tests.experiments.runs import CONFIG, curve, make_run, make_sweep


@pytest.fixture
def sweep(here):
    cells = {
        "grpo": {s: (curve([0.1, 0.5, 0.9], seconds=4.0), {}) for s in (1, 2)},
        "cppo": {s: (curve([0.1, 0.5, 0.9]), {}) for s in (1, 2)},
    }
    return make_sweep(here / "runs" / "s", cells)


@pytest.fixture
def no_page(monkeypatch):
    """For what is printed: the charts of a page take a second."""
    monkeypatch.setattr("proxima.view.comparison_page.write_comparison", lambda comparison, path, **more: path)


@pytest.mark.slow
def test_a_sweep(proxima, sweep):
    code, out, err = proxima("compare", "runs/s", "--target", "0.8")
    assert (code, err) == (0, "")
    head, grpo, cppo, _, costs, _, cost, note, *_, page = out.splitlines()
    assert note.startswith("note: 2 seeds (grpo, cppo) are too few: their 95 % intervals are very wide")
    assert head.split()[:6] == ["cell", "seeds", "accuracy", "before", "after", "best"]
    assert grpo.split()[:5] == ["grpo", "2", "0.100", "±", "0.000"]
    assert cppo.split()[:2] == ["cppo", "2"] and costs.split()[:1] == ["cell"]
    assert "7.0 s (2.00 ×)" in cost
    assert page == "runs/s/compare.html" and (sweep / "compare.html").read_text().startswith("<!doctype html>")
    other = proxima("compare", "runs/s", "--target", "0.8", "--baseline", "cppo", "--json")[1]
    assert json.loads(other)["cells"][0]["reach"]["time"]["ratio"] == 0.5


def test_the_table_fits_a_hundred_columns(proxima, sweep, no_page):
    """No figure is cut: columns that have no room are below."""
    for words in ([], ["--target", "0.8"]):
        code, out, _ = proxima("compare", "runs/s", *words)
        assert code == 0 and max(map(len, out.splitlines())) <= 100 and "…" not in out
        assert out.count("\ngrpo ") == out.count("\ncell ") + 1 >= 2


@pytest.mark.slow
def test_numbers_for_programs(proxima, sweep, here):
    code, out, _ = proxima("compare", "runs/s", "--target", "0.8", "--json")
    output = json.loads(out)
    assert code == 0 and output["page"] is None and not (sweep / "compare.html").exists()
    assert [cell["cell"] for cell in output["cells"]] == ["grpo", "cppo"]
    assert output["cells"][1]["reach"]["time"]["values"] == [7.0, 7.0]
    assert output["cells"][1]["folders"] == ["runs/s/cppo/seed-1", "runs/s/cppo/seed-2"]
    code, out, _ = proxima("compare", "runs/s", "--json", "--out", "page.html")
    assert json.loads(out)["page"] == "page.html" and (here / "page.html").exists()


@pytest.mark.slow
def test_runs_and_patterns(done, proxima, sweep, here):
    make_run(here / "single", curve([0.1, 0.3]), kind="dppo", status=None, steps=9)
    out = done("compare", "runs/s/cppo/*", "single")
    assert "note: single seed 1: unfinished at step 2 of 9; included as far as it got" in out
    assert out.splitlines()[-1] == "compare.html"
    assert proxima("compare", "single")[1].splitlines()[-1] == "compare.html (replaced)"


def test_what_cannot_be_compared(proxima, refusal, sweep, here, no_page):
    assert proxima("compare", "runs/ss")[::2] == (2, "error: runs/ss does not exist; did you mean 'runs/s'?\n")
    empty = make_run(here / "new", [])
    alone = "error: new has no metrics; it has not finished a step or an evaluation yet\n"
    assert proxima("compare", "new")[::2] == (2, alone)
    code, _, err = proxima("compare", "new", "runs/s")
    assert (code, err) == (0, "WARNING new has no metrics; it has not finished a step or an evaluation yet\n")
    other = make_run(here / "new2", [])
    said = "error: none of the 2 runs has recorded metrics; wait for a finished step"
    assert refusal("compare", str(empty), str(other)) == said
    said = "error: --out none/x.html: must be a file in a folder that exists"
    assert refusal("compare", "runs/s", "--out", "none/x.html") == said


def test_a_comparison_that_is_not_fair_is_said(proxima, here):
    for name, limit in (("a", 10), ("b", 20)):
        make_run(here / "r" / name, curve([0.1, 0.5]), config=CONFIG.replace("limit: 100", f"limit: {limit}"))
    code, _, err = proxima("compare", "r")
    assert code == 0 and err.startswith("WARNING the cells were evaluated on different questions (eval.limit)")
    assert "evaluated on different questions" in (here / "r" / "compare.html").read_text()


def test_a_metric_under_the_name_of_another_framework(done, proxima, refusal, here, no_page):
    for seed, kl in ((1, 0.001), (2, 0.003)):
        records = [{**r, "mismatch/k3_kl": kl} if r["kind"] == "train" else r for r in curve([0.1, 0.5])]
        make_run(here / "runs" / str(seed), records, seed=seed)
    out = done("compare", "runs/1", "runs/2", "--metric", "mismatch_k3_kl")
    assert "mismatch/k3_kl, mean over the last tenth of the steps\n" in out and "0.002 ± " in out
    output = json.loads(proxima("compare", "runs/1", "runs/2", "--metric", "rollout_corr/k3_kl", "--json")[1])
    assert next(iter(output["metrics"]["rollout_corr/k3_kl"].values()))["mean"] == 0.002
    near = "it; the nearest: mismatch/k3_kl, time/generate, length/mean; all are keys of runs/1/metrics.jsonl"
    assert near in refusal("compare", "runs/1", "--metric", "mismatch/k3_lk")


def test_out_is_a_page_a_figure_or_a_table_by_its_suffix(done, proxima, sweep, here):
    for name, begins in {
        "a.svg": b"<svg ", "a.png": b"\x89PNG", "a.pdf": b"%PDF", "a.html": b"<!doctype html>",
        "a.csv": b"cell,seeds,runs,before,", "a.json": b"{", "a.md": b"| cell | seeds |",
    }.items():  # fmt: skip
        assert done("compare", "runs/s", "--out", name).rstrip().endswith(name)
        assert (here / name).read_bytes().startswith(begins), name
    svg = (here / "a.svg").read_text()
    assert ">held-out accuracy</text>" in svg and ">reward/mean</text>" in svg and "grpo  n=2" in svg
    assert json.loads((here / "a.json").read_text())["cells"][0]["cell"] == "grpo"
    for name in ("a.jpg", "a"):
        code, out, err = proxima("compare", "runs/s", "--out", name)
        assert (code, out) == (2, "") and not (here / name).exists() and err.count("\n") == 1
        assert f"--out {name} has " in err and "write one of .html, .svg, .png, .pdf, .csv, .json, .md" in err
    assert proxima("compare", "runs/s", "--out", "b.csv", "--over", "seed")[0] == 2 and not (here / "b.csv").exists()


def test_formats_of_the_table(done, proxima, sweep):
    numbers = [*csv.DictReader(done("compare", "runs/s", "--format", "csv").splitlines())]
    assert [(row["cell"], row["seeds"], float(row["after"])) for row in numbers] == [
        ("grpo", "2", 0.9),
        ("cppo", "2", 0.9),
    ]
    head, rule, *rows = done("compare", "runs/s", "--format", "md").splitlines()
    assert head.startswith("| cell | seeds | accuracy before |") and rule.startswith("|---|---:|") and len(rows) == 2
    assert done("compare", "runs/s", "--format", "json") == done("compare", "runs/s", "--json")
    assert not (sweep / "compare.html").exists()
    code, out, err = proxima("compare", "runs/s", "--json", "--format", "csv")
    assert (code, out) == (2, "") and "--format='csv' excludes --json; give one of them" in err
