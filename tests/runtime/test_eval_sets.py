"""Several held-out sets in a run: each with its own questions, rewards, metrics, rows and curve."""

import pytest

from proxima.api.saved import load_run
from proxima.config.resolution import resolve
from proxima.evaluation.headline import Headline
from proxima.evaluation.held_out import named_sets
from proxima.evaluation.question_sets import recipe_suites
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from proxima.view.log_lines import LogLines, set_lines
from proxima.view.report import write_report
from tests.runtime.runs import SETS
from tests.runtime.tiny_run import recipe, timeless


@pytest.fixture
def run(runs):
    """The folder of a run with two further sets; read-only by agreement."""
    return runs.finished("held-out sets")


@pytest.mark.slow
def test_each_set_has_its_metrics_and_files_and_the_main_one_is_unchanged(run, runs):
    records = [timeless(r) for r in RunFolder(run).read_metrics()]
    main = [{k: v for k, v in r.items() if k != "metric" and not k.startswith(("few/", "many/"))} for r in records]
    assert main == runs.traces("plain")["metrics"]
    for record in (r for r in records if r["kind"] == "eval"):
        few, many = named_sets(record)["few"], named_sets(record)["many"]
        assert (few["questions"], few["answers"], many["questions"], many["answers"]) == (3, 3, 4, 8)
        assert {"accuracy", "accuracy/low", "reward/mean"} <= few.keys() and {"mean@2", "pass@2"} <= many.keys()
        rows = read_rows(run / "evals" / f"{record['step']:06d}-{record['label']}-few.parquet")
        assert sum(row["correct"] for row in rows) == few["correct"] and len(rows) == 3
        rows = read_rows(run / "evals" / f"{record['step']:06d}-{record['label']}-many.parquet")
        assert len(rows) == 8 and {row["sample"] for row in rows} == {0, 1}
        assert many["correct"] == 0  # the set's own reward reads numbers, and a random model writes none


@pytest.mark.slow
def test_one_of_them_is_the_headline_and_the_summary_has_all(run, runs):
    record = RunFolder(run).read_metrics()[-1]
    headline = Headline.of([record])
    assert (headline.key, headline.value(record)) == ("few/accuracy", record["few/accuracy"])
    assert headline.bounds(record) == (record["few/accuracy/low"], record["few/accuracy/high"])
    sets = runs.made("held-out sets").summary.eval["after"]["sets"]
    assert [*sets] == ["few", "many"] and "sets" not in sets["few"]
    few = {"accuracy": record["few/accuracy"], "metric": "accuracy", "low": record["few/accuracy/low"], "step": 3}
    assert sets["few"].items() >= few.items()


@pytest.mark.slow
def test_the_log_and_the_report_have_a_row_for_each(run):
    record = RunFolder(run).read_metrics()[-1]
    few, many = set_lines(record)
    assert few.split()[:2] == ["few", "accuracy"] and few.endswith("3 questions") and "95 %" in few
    assert many.split()[0] == "many"
    written: list[str] = []
    LogLines(written.append).evaluated(record)
    assert [line.split()[1] for line in written] == ["eval", "few", "many"]
    page = write_report(run).read_text()
    assert "<h2>Held-out sets</h2>" in page and "<td>few</td><td>accuracy</td><td>3</td>" in page
    assert len(load_run(run).answers(held_out="few")) == 3 * len(RunFolder(run).eval_files()) == 9
    assert ">5 of 5 held-out questions<" in page  # those of eval.task
    (run / "report.html").unlink()


def test_proxima_eval_of_the_recipe_has_all_sets(tiny_model):
    config = resolve(recipe(tiny_model("llama"), eval__sets=SETS)).config
    suites = recipe_suites(config.eval, config.reward)
    facts = [(s.name, s.limit, s.samples, s.sampling.temperature, s.sampling.max_tokens) for s in suites]
    assert facts == [("arithmetic", 200, 1, 0.0, 6), ("few", 200, 1, 0.0, 6), ("many", 4, 2, 1.0, 6)]
