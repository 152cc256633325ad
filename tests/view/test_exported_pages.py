"""Report and comparison in a browser: offline, with the viewer's charts, on a phone, in the dark, without a script."""

import json
from contextlib import contextmanager

import pytest

from proxima.runtime.state.rollouts import write_rollouts
from proxima.view.comparison_page import write_comparison
from proxima.view.report import write_report
from tests.campaigns import campaign
from tests.experiments.runs import CONFIG, curve, make_sweep
from tests.experiments.runs import comparison as compared
from tests.view.microscope.test_page import LOOKS, UNNAMED, browser, listened, needs_browser, serious  # noqa: F401
from tests.view.microscope.test_stages import written
from tests.view.synthetic import group, records, whole_run
from tests.view.test_report import HOSTILE

pytestmark = needs_browser
READ = "tests/view/test_exported_pages.py::test_both_can_be_read"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Of a run whose last step is hostile."""
    folder = whole_run(tmp_path_factory.mktemp("runs") / "quickstart", steps=30)
    evil = [group(uid, [HOSTILE, "4"], [True, False], question=HOSTILE) for uid in range(2)]
    write_rollouts(folder.rollout_file(30), 30, evil, records(evil))
    written(folder.timeline)
    config = folder.config.read_text() + f"note: {json.dumps(HOSTILE)}\n"
    folder.config.write_text(config)
    return write_report(folder.path)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    cells = {}
    for k in range(9):
        config = CONFIG.replace("1.0e-05", str(k + 1.0))
        cells[f"<b>{k}" if k == 8 else f"c{k}"] = {
            s: (curve([0.1, 0.4, 0.5 + 0.05 * k - 0.01 * s], reward=0.1 * k, seconds=1.0 + k), {"config": config})
            for s in (1, 2, 3)
        }
    root = make_sweep(tmp_path_factory.mktemp("sweep"), cells)
    return write_comparison(compared(root, target=0.5), root / "compare.html", over="train.optimizer.lr")


@contextmanager
def opened(browser, file, **options):  # noqa: F811
    """The page of a file, offline; at the end nothing was said in its console, and it has asked for nothing."""
    with listened(browser, file.as_uri(), offline=True, **options) as (page, said):
        page.goto(file.as_uri())
        if options.get("java_script_enabled", True):
            page.wait_for_selector("#curves svg")
        yield page
    assert said == []


@pytest.mark.slow
def test_the_report_has_the_curves_of_the_viewer_and_opens_samples(browser, report):  # noqa: F811
    with opened(browser, report) as page:
        first = page.locator("#curves figure").first
        first.scroll_into_view_if_needed()
        first.locator("svg").wait_for()
        assert first.inner_text().startswith("reward/mean")
        titles = page.locator("#curves section:has(> .charts) > h2").all_inner_texts()
        assert titles[:2] == ["Vital signs", "Rewards"]
        last = first.locator("output").inner_text()
        first.locator("svg").hover(position={"x": 3, "y": 40})
        assert first.locator("output").inner_text() != last
        assert (
            page.inner_text("button.main") == "open step 1" and page.locator(".ruler[visibility=visible]").count() > 3
        )
        assert page.get_attribute("details[open]", "data-step") == "30"
        first.locator("svg").click(position={"x": 3, "y": 40})
        page.wait_for_selector('details[data-step="1"][open]')
        assert page.locator("details[name=samples][open]").count() == 1
        page.fill("#curves input[type=search]", "time/")
        assert page.locator("#curves figure").count() == 3
        assert "step 8" in page.locator("svg.timeline").text_content()


@pytest.mark.slow
def test_hostile_text_is_shown_and_does_nothing(browser, report):  # noqa: F811
    with opened(browser, report) as page:
        assert "<img src=x" in page.inner_text("details[open]")
        assert page.locator("img").count() == 0 and page.locator("script").count() == 2


@pytest.mark.slow
def test_the_comparison_draws_every_cell_over_the_axis_that_is_chosen(browser, comparison):  # noqa: F811
    with opened(browser, comparison) as page:
        held = page.locator("#curves figure").first
        assert held.locator("path.area").count() == 9 and held.locator("circle").count() == 27
        assert held.locator("path.again").count() == 2 and held.locator("path.target").count() == 1  # line and area
        read = held.locator("output").first
        assert read.inner_text() == "0.48"
        held.locator("svg").hover(position={"x": 5, "y": 40})
        assert read.inner_text() == "0.1" and page.locator(".ruler[visibility=visible]").count() == 4
        page.click("text=training clock, s >> nth=0")
        assert held.locator(".x").inner_text() == "training clock, s"
        assert held.locator("svg text").last.text_content() == "36"
        page.click("#curves button:has-text('<b>8')")
        assert held.locator("path.area").count() == 8 and held.locator("svg text").last.text_content() == "32"
        over = page.locator("#curves figure:has-text('train.optimizer.lr')")
        assert over.count() == 2 and over.first.locator("path.whisker").count() == 8


@pytest.mark.slow
def test_the_results_need_no_script(browser, report, comparison):  # noqa: F811
    with opened(browser, report, java_script_enabled=False) as page:
        shown = page.inner_text("main")
        for text in ("188/200", "95 % interval 0.898 to 0.965", "5 of 200 held-out questions", "Not trained on"):
            assert text in shown
        assert "The curves need JavaScript" in shown and "4 of" not in shown and "expected" in shown
    with opened(browser, comparison, java_script_enabled=False) as page:
        shown = page.inner_text("main")
        assert "Final table" in shown and "0.480 ± 0.025" in shown and "The curves need JavaScript" in shown


@pytest.mark.slow
@pytest.mark.parametrize("look", ["phone", *campaign(READ, ["desk", "dark"])])
def test_both_can_be_read(browser, report, comparison, look):  # noqa: F811
    """No page is wider than the window; names, roles and contrast by axe-core, where it is installed."""
    for file in (report, comparison):
        with opened(browser, file, **LOOKS[look]) as page:
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
            assert page.evaluate(UNNAMED) == []
            assert serious(page) == []


@pytest.mark.slow
def test_the_pages_are_small(report, comparison):
    assert report.stat().st_size < 200_000 and comparison.stat().st_size < 100_000
