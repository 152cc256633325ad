"""The page in a browser: every view, by keyboard alone, on a phone, in the dark, with hostile text, and in one file."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from proxima.core.surrogate import SURROGATES
from proxima.view.microscope.completion_page import base64_column
from tests.campaigns import campaign
from tests.view.microscope.made_run import MadeRun, serve
from tests.warm import WarmPopen

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PLAYWRIGHT = importlib.util.find_spec("playwright")
needs_browser = pytest.mark.skipif(not (CHROMIUM and PLAYWRIGHT), reason="needs Chromium and playwright")
pytestmark = needs_browser
ROUTES = {
    "runs": "",
    "trend": "0",
    "step": "0/step/3",
    "group": "0/step/3/group/103",
    "played": "0/step/3/group/104",
    "completion": "0/step/3/completion/103.1.0",
    "episode": "0/step/3/completion/103.2.0?tint=policy_version",
    "compare": "0/compare?step=1&c=103.1.0&run2=1&step2=3",
}


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], env=kept)

        def new_context(**options):
            context = launched.new_context(**options)
            context.set_default_timeout(600_000)
            return context

        yield SimpleNamespace(new_context=new_context)
        launched.close()


@contextmanager
def listened(browser, address, **options):
    """A page, and the list of what it says in its console, its errors, and what it asks of another address."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if address not in request.url else None)
    try:
        yield page, said
    finally:
        context.close()


@contextmanager
def opened(browser, run, refused=False, **options):
    """A page at the made run's server; at the end nothing was said in its console, and nothing failed, but what the
    browser itself says of a request that was `refused`."""
    server = serve(run)

    def visit(name):
        page.goto("about:blank")
        page.goto(f"{server.address}#/{ROUTES.get(name, name)}")
        page.wait_for_selector("#crumbs li")
        page.wait_for_selector("#view > *")

    try:
        with listened(browser, server.address, **options) as (page, said):
            page.visit, page.server = visit, server
            yield page
        refusals = [line for line in said if "server responded with a status of 400" in line]
        assert bool(refusals) == refused
        assert [line for line in said if line != "about:blank" and line not in refusals] == []
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def page(browser):
    """The page of a made run."""
    with opened(browser, MadeRun()) as page:
        yield page


def test_the_way_down_by_clicks(page):
    page.visit("runs")
    assert page.locator(".runs .bad").inner_text() == "✕ metrics.jsonl is of format 1; this reads 3"
    page.click("text=quickstart >> nth=0")
    page.wait_for_selector(".charts svg")
    assert page.locator(".charts figure").count() == 13
    assert "held-out accuracy 0.25 → 0.75" in page.inner_text(".where")
    titles = page.locator("section:has(> .charts) > h2").all_inner_texts()
    assert titles == ["Vital signs", "Rewards", "Updates", "Time and speed", "Other"]
    first = page.locator(".charts figure").first.inner_text()
    assert first.startswith("reward/mean") and "mean over the valid completions generated in the step" in first
    page.locator(".charts svg").first.click(position={"x": 3, "y": 40})
    page.wait_for_url("**#/0/step/1*")
    page.wait_for_selector(".fates button")
    assert page.locator(".fates button").all_inner_texts()[0].startswith("trained")
    page.click('[aria-label^="Groups"] [data-index="0"]')
    page.wait_for_url("**/group/*")
    page.wait_for_selector(".columns article .differs")
    assert page.locator(".columns article").count() == 8
    page.click(".columns article >> nth=1 >> a")
    page.wait_for_url("**/completion/*.1.0*")
    page.wait_for_selector(".tok.at")
    with page.expect_response("**/token/5*"):  # the answers to other tokens are the same
        page.click(".tokens .tok >> nth=5")
    page.wait_for_url("**t=5*")
    page.wait_for_selector("text=masked: 0.21 > 0.18 because the prefix had spent 0.07")
    shown = page.inner_text(".inspector")
    for text in ("π current\t−0.25\t77.9 %", "ratio\t1.284", "threshold\t0.18", "“ third”", "not stored; --recompute"):
        assert text in shown
    page.click("#crumbs >> text=step 1")
    page.wait_for_selector(".fates button")


def test_tokens_are_counted_from_1(page):
    page.visit("0/step/3/completion/103.2.0?t=0")
    page.wait_for_selector(".tok.at")
    length = page.server.run.completions["length"][3 * 8 + 2]
    assert f"token 1 of {length}" in page.inner_text(".inspector")
    assert "token 1" in page.inner_text(".band figcaption > output")
    page.keyboard.press("End")
    assert f"token {length} of {length}" in page.inner_text(".inspector")
    slider = page.locator(".band [role=slider]")
    values = [slider.get_attribute(f"aria-value{name}") for name in ("min", "now", "max")]
    assert values == ["1", str(length), str(length)]
    other = page.locator(".graph a[href]").first.get_attribute("aria-label")
    assert other.startswith(f"another path from token {length // 4 + 4}")  # 3 tokens of its second message are shared
    page.visit("0/compare?step=1&c=103.1.0&run2=1&step2=3")
    page.wait_for_selector(".pair .tok.at")
    assert page.locator(".compare thead th").first.inner_text() == "token 18"


def test_groups_say_how_many_completions_were_trained(page):
    page.visit("step")
    page.wait_for_selector(".fates button")
    trained = page.locator('[aria-label^="Groups"] .space .row > :last-child').all_inner_texts()
    rows = page.server.run.completions
    assert sum(int(text.partition("/")[0]) for text in trained) == rows["outcome"].count("trained")
    assert {text.partition("/")[2] for text in trained} == {"8"} and "used" not in page.inner_text(".lists")


CUT = "tests/view/microscope/test_page.py::test_a_question_is_cut_only_where_its_row_is_full"


@pytest.mark.parametrize("width", [1000, *campaign(CUT, [1280, 1600])])
def test_a_question_is_cut_only_where_its_row_is_full(width, browser):
    run = MadeRun()
    run.text = lambda words: words.replace("What is", "Of these, what is")  # 24 characters
    with opened(browser, run, viewport={"width": width, "height": 800}) as page:
        page.visit("step")
        page.wait_for_selector(".space .row")
        cut = "all => all.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent)"
        assert page.locator(".row.head > div, .row > div:first-child").evaluate_all(cut) == []
        assert page.locator(".list").evaluate_all("all => all.map((one) => one.scrollWidth - one.clientWidth)") == [
            0,
            0,
        ]


def test_a_chart_cuts_neither_its_name_nor_its_numbers(browser):
    run, smallest = MadeRun(), -0.000123
    long = "mismatch/probability_0.001_0.01/log_prob_absdiff"
    run.trend["metrics"] |= {long: [smallest, *[1e9] * 11]}
    run.trend["about"] |= {long: ["Other", "with a long name"]}
    with opened(browser, run) as page:
        page.visit("0")
        page.locator(f'[data-name="{long}"]').scroll_into_view_if_needed()
        page.wait_for_selector(f'[data-name="{long}"] svg')
        outside = page.locator(".charts svg text").evaluate_all(OUTSIDE)
        assert outside == [] and "−0.000123" in page.locator(f'[data-name="{long}"] svg').text_content()
        cut = "all => all.filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent)"
        assert page.locator(".charts figcaption, .charts figcaption > *").evaluate_all(cut) == []


#: Texts that reach beyond their chart.
OUTSIDE = """all => all.filter((one) => {
  const box = one.getBoundingClientRect(), chart = one.closest("svg").getBoundingClientRect();
  return box.left < chart.left || box.right > chart.right || box.top < chart.top || box.bottom > chart.bottom;
}).map((one) => one.textContent)"""


class Skipped(MadeRun):
    """Of completions with advantage 0 only the log-probs of the engine are stored."""

    empty = False

    def completion(self, name, step=1):
        made = super().completion(name, step)
        n = 0 if self.empty else len(made["tokens"]["text"])
        columns = {"advantage": np.zeros(n), "behavior_log_prob": np.full(n, -0.5), "policy_version": np.full(n, 3)}
        tokens = {key: values[:n] for key, values in made["tokens"].items()}
        columns = {key: base64_column(value) for key, value in columns.items()}
        return {
            **made,
            "tokens": tokens,
            "columns": columns,
            "band": None,
            "episode": None,
            "problem": "no forward pass",
        }


def test_a_completion_has_no_empty_panel(browser):
    run = Skipped()
    with opened(browser, run) as page:
        page.visit("completion")
        page.wait_for_selector(".tok.at")
        assert not page.locator(".band").is_visible()  # nothing varies along the answer
        height = "(one) => one.getBoundingClientRect().height"
        assert page.locator(".tokens").evaluate(height) <= page.locator(".piece").evaluate(height) * 1.6
        run.empty = True
        page.visit("0/step/3/completion/103.3.0")
        page.wait_for_selector("text=no tokens")
        assert not page.locator(".band").is_visible() and not page.locator(".inspector").is_visible()


def test_in_a_frame_of_another_page_it_says_what_is_missing(browser):
    server = serve(MadeRun())
    page = browser.new_context().new_page()
    page.set_content("<iframe width=900 height=500></iframe>")
    frame = page.frame_locator("iframe")

    def shown_in(sandbox):
        page.eval_on_selector("iframe", "(frame, text) => { frame.sandbox = text; }", sandbox)
        place = f"{server.address}?{sandbox.replace(' ', '+')}#/0"
        with page.expect_event("framenavigated", lambda shown: shown.url == place):  # else the page before is read
            page.eval_on_selector("iframe", "(frame, text) => { frame.src = text; }", place)

    for sandbox in ("", "allow-scripts"):  # as a module of the frame's origin, the script may not load
        shown_in(sandbox)
        frame.locator("text=The script of this page has not run.").wait_for()
        frame.locator("#view", has_text='sandbox="allow-scripts allow-same-origin"').wait_for()
    shown_in("allow-scripts allow-same-origin")
    frame.locator(".charts svg").first.wait_for()
    assert frame.locator("#missing").inner_text() == "This frame has no storage: the theme is not kept."
    page.route("**/api/0/step/**", lambda route: route.abort())
    frame.locator(".charts svg").first.click(position={"x": 3, "y": 40})
    frame.locator("[role=alert]").wait_for()
    assert "Or this frame forbids requests: open it in a window." in frame.locator("[role=alert]").inner_text()
    page.context.close()
    server.shutdown()
    server.server_close()


def test_by_keyboard_alone(page):
    page.visit("0")
    press = page.keyboard.press
    page.wait_for_selector(".charts svg")
    press("ArrowLeft")
    press("Enter")
    page.wait_for_url("**#/0/step/11*")
    page.wait_for_selector(".lists")
    press("ArrowDown")
    assert page.locator('[aria-label^="Groups"] .row.at').get_attribute("aria-rowindex") == "3"
    press("Enter")
    page.wait_for_url("**/group/*")
    page.wait_for_selector(".columns")
    press("ArrowRight")
    press("b")
    press("Escape")
    page.wait_for_url("**#/0/step/11*")
    page.wait_for_selector(".lists")
    press("Enter")
    page.wait_for_selector(".columns")
    press("ArrowRight")
    press("Enter")
    page.wait_for_url("**/completion/*.1.0*")
    page.wait_for_selector(".tok.at")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "m"):
        press(key)
    assert page.locator(".tok.at.masked").count() == 1
    before = page.input_value('[aria-label="Tint"]')
    press("t")
    assert page.input_value('[aria-label="Tint"]') != before
    press("z")
    assert page.inner_text(".band button") == "zoom 8×"
    press("/")
    page.keyboard.type("therefore")
    press("Enter")
    assert page.locator(".tok.hit").count() > 0 and "therefore" in page.inner_text(".tok.at")
    press("Escape")
    press("?")
    assert "next masked token" in page.inner_text("dialog")
    press("Escape")
    press("n")
    page.wait_for_url("**/completion/*.2.0*")
    page.wait_for_selector(".tok.at")
    press("Backspace")
    page.wait_for_url("**/group/*")


def test_filters_and_histogram(browser):
    with opened(browser, MadeRun(), refused=True) as page:
        page.visit("step")
        rows = page.server.run.completions
        shown = page.locator('section:has([aria-label="Completions"]) h2 span')
        page.keyboard.press("h")
        page.keyboard.press("ArrowLeft")  # the last bar
        right = sum(value == 1 for value in rows["reward"])
        assert shown.inner_text() == f"{right} of 64" and "reward_from=1" in page.url
        page.keyboard.press("Escape")
        assert shown.inner_text() == "64 of 64"
        page.click(".fates button >> nth=1")
        name = page.locator(".fates button >> nth=1").get_attribute("data-name")
        assert shown.inner_text() == f"{rows['outcome'].count(name)} of 64"
        page.click("text=clear")
        page.fill('[aria-label="length, at least"]', "100")
        page.wait_for_url("**length_from=100*")
        assert shown.inner_text() == f"{sum(n >= 100 for n in rows['length'])} of 64"
        page.click("text=clear")
        page.fill('[aria-label="Text of the answers"]', "nothing")
        page.wait_for_selector("text=no completion passes the filters")
        assert shown.inner_text() == "0 of 64"
        page.check("text=regex")
        page.fill('[aria-label="Text of the answers"]', "(")
        page.wait_for_selector("[role=alert]:has-text('missing )')")
        page.visit("0/step/3?outcome=invalid")  # an address has its filters
        assert shown.inner_text() == "1 of 64"


def test_tints_have_signs_beside_colour(page):
    page.visit("completion")
    tints = page.locator('[aria-label="Tint"] option').evaluate_all("all => all.map((one) => one.value)")
    first = ("advantage", "log_ratio", "mismatch", "entropy", "divergence", "policy_version", "keep", "loss_weight")
    assert tints[:9] == ["none", *first]
    style = "(one) => { const s = getComputedStyle(one); return [s.boxShadow, s.textDecorationLine] }"
    page.select_option('[aria-label="Tint"]', "log_ratio")
    for name, sign in ((".tokens .tok.p1", "inset"), (".tokens .tok.m1", "inset")):
        assert sign in page.locator(name).first.evaluate(style)[0]
    assert page.locator(".tokens .tok.p1").first.evaluate(style) != page.locator(".tokens .tok.m1").first.evaluate(
        style
    )
    assert page.locator(".tokens .tok.masked").first.evaluate(style)[1] == "line-through"
    assert "≥ +" in page.inner_text(".legend")
    page.visit("episode")
    assert page.locator(".tok[data-version]").count() >= 1 and page.locator(".tok.given").count() > 0
    assert "search(query=sum of 1 and 2)" in page.inner_text(".episode")
    nodes = page.locator(".graph a")
    assert nodes.count() == 5 + 2  # the messages, and what the other path has from its fork on
    other = page.locator(".graph a[href]").first
    assert other.get_attribute("href") == "#/0/step/3/completion/103.2.1"
    assert other.get_attribute("aria-label").startswith("another path from token ")
    assert "calls search, reward +0.25" in nodes.first.get_attribute("aria-label")
    page.locator(".graph [role=button] >> nth=1").focus()
    page.keyboard.press("Enter")  # the tool's answer: its first token
    page.wait_for_url("**t=15*")


def test_episodes_of_a_group_are_read_turn_by_turn(page):
    page.visit("0/step/3/group/104")
    cards = page.locator(".columns article")
    assert cards.count() == 8 and page.locator(".columns button").count() == 0  # no words to compare
    said = cards.first.locator(".turns li").all_inner_texts()
    assert [text.split()[0] for text in said] == ["turn", "tool", "turn", "tool", "turn"]
    assert "turn 0 reward +0.25" in said[0] and "→ search(query=sum of 1 and 2)" in said[0]
    assert "unreadable call: no closing brace" in said[2]
    assert "reward of the episode +1 · ended by the limit of turns · begun 2 times" in cards.first.inner_text()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_url("**/completion/104.1.0*")


def test_compare_marks_the_first_difference(page):
    page.visit("compare")
    assert "First difference at token 18" in page.inner_text(".compare .bar")
    assert page.locator(".pair .tok.first").count() == 2
    assert page.locator(".pair .tok.first >> nth=1").inner_text() == " otherwise"
    page.visit("0/compare?step=1&c=103.1.0&run2=1&step2=1")
    assert "The tokens are the same." in page.inner_text(".compare .bar")
    page.visit("completion")
    page.click(".further button")
    page.wait_for_url("**/compare*")


def test_a_note_is_saved_and_listed(page):
    page.visit("0/step/3/completion/103.1.0?t=7")
    page.click(".note summary")
    page.fill(".note textarea", "why <b>this</b> one?")
    page.click("text=save the note")
    page.wait_for_selector("text=note ●")
    assert page.server.run.notes["0"] == {"step/3/completion/103.1.0?t=7": "why <b>this</b> one?"}
    page.visit("0")
    assert page.inner_text(".notes a") == "step/3/completion/103.1.0, token 8"
    page.click(".notes a")
    page.wait_for_url("**/completion/103.1.0?t=7*")
    page.wait_for_selector(".note[open]")
    assert page.input_value(".note textarea") == "why <b>this</b> one?"


def test_a_running_step_appears_by_itself(browser):
    run = MadeRun()
    run.running = True
    with opened(browser, run) as page:
        page.visit("0")
        page.wait_for_selector("#live:has-text('step 12')")
        run.steps.append(13)
        del run.trend
        page.wait_for_selector("button:has-text('open step 13')")
        page.wait_for_selector("#live:has-text('step 13')")


LOOKS = {"phone": {"viewport": {"width": 360, "height": 740}}, "desk": {}, "dark": {"color_scheme": "dark"}}


FIRST = ("trend", "completion")  # the views that `make test` reads
READ = "tests/view/microscope/test_page.py::test_every_view_can_be_read"


@pytest.mark.parametrize("look", ["phone", *campaign(READ, ["desk", "dark"])])
@pytest.mark.parametrize("route", [*FIRST, *campaign(READ, [route for route in ROUTES if route not in FIRST])])
def test_every_view_can_be_read(route, look, browser):
    """No view is wider than the window; names, roles and contrast by axe-core, where it is installed."""
    with opened(browser, MadeRun(), **LOOKS[look]) as page:
        page.visit(route)
        page.wait_for_timeout(150)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert page.evaluate(UNNAMED) == []
        assert serious(page) == []


def test_every_tint_can_be_read(page):
    page.visit("completion")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for tint in page.locator('[aria-label="Tint"] option').evaluate_all("all => all.map((one) => one.value)"):
            page.select_option('[aria-label="Tint"]', tint)
            assert page.evaluate(CONTRAST) >= 4.5, (scheme, tint)


def serious(page):
    """What axe-core, where it is installed, finds serious in a page."""
    if (found := importlib.util.find_spec("axe_playwright_python")) is None:
        return []
    page.evaluate((Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8"))
    result = page.evaluate("axe.run().then((result) => result.violations)")
    return [
        (one["id"], one["nodes"][0]["html"][:200], one["nodes"][0]["failureSummary"])
        for one in result
        if one["impact"] in ("serious", "critical")
    ]


#: Controls and graphics that a screen reader has no name for.
UNNAMED = """() => {
  const named = (one) => one.getAttribute("aria-label") || one.textContent.trim() || one.closest("label");
  const kinds = "button, a, input, select, textarea, [role=slider], [role=grid], [role=group], svg[role=img]";
  return [...document.querySelectorAll(kinds)].filter((one) => !named(one)).map((one) => one.outerHTML);
}"""

#: The least contrast of a token's ink with what lies behind it, by the formula of WCAG 2.
CONTRAST = """() => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const light = (layers) => {
    pen.clearRect(0, 0, 1, 1);
    for (const layer of layers) { pen.fillStyle = layer; pen.fillRect(0, 0, 1, 1); }
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = getComputedStyle(document.querySelector(".tokens")).backgroundColor;
  return Math.min(...[...document.querySelectorAll(".tok")].map((one) => {
    const { color, backgroundColor } = getComputedStyle(one), pair = [light([color]), light([behind, backgroundColor])];
    return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
  }));
}"""


def test_hostile_text_is_shown_and_does_nothing(browser):
    run = MadeRun(hostile=True)
    run.notes["0"]['"><img src=x onerror=window.ran=4>'] = "<script>window.ran=5</script>"
    with opened(browser, run) as page:
        for name in ROUTES:
            page.visit(name)
            page.wait_for_timeout(100)
            assert page.evaluate("window.ran") is None
            assert page.locator("img, script:not([src]), svg[onload]").count() == 0
        page.visit("completion")
        page.wait_for_selector(".reason:has-text('onerror')")
        assert "</script><script>window.ran=1</script>" in page.inner_text(".tokens")
        page.visit("0")
        page.wait_for_selector(".notes li p")
        assert page.inner_text(".notes li p") == "<script>window.ran=5</script>"


def test_long_answers_and_many_completions_draw_what_is_in_sight(browser):
    with opened(browser, MadeRun(groups=1250, size=8, tokens=32_000)) as page:
        page.visit("step")
        assert "10,000 of 10,000" in page.inner_text(".lists")
        assert page.locator(".space .row").count() < 150
        page.keyboard.press("c")
        page.keyboard.press("End")
        assert page.locator('[aria-label="Completions"] .row.at').get_attribute("aria-rowindex") == "10001"
        page.visit("0/step/1/completion/100.1.0")
        page.wait_for_selector(".tok.at")
        assert page.locator(".tok").count() < 6000
        page.keyboard.press("End")
        page.wait_for_url("**t=31999*")
        assert page.locator(".tok.at").is_visible()
        assert len(page.locator(".tokens").text_content()) == len(
            "".join(page.server.run.completion("100.1.0")["tokens"]["text"])
        )


def test_what_is_missing_is_said(page):
    server, other = page.server, page.context.new_page()  # whose console names the request that failed
    other.goto(f"{server.address}#/0/step/999")
    other.wait_for_selector("[role=alert]")
    assert "nothing here" in other.inner_text("[role=alert]")
    server.run.trend["metrics"].clear()
    server.run.trend["about"].clear()
    server.run.trend["steps"].clear()
    server.run.trend["rollout_steps"].clear()
    other.goto("about:blank")
    other.goto(f"{server.address}#/0")
    other.wait_for_selector("text=no step has completions")


def test_the_exported_file_needs_no_server(browser, tmp_path):
    from proxima.view.microscope.exported_page import exported_page
    from proxima.view.microscope.server import open_runs
    from tests.view.microscope.stored_run import make_step

    make_step(tmp_path / "run", SURROGATES["cppo"](), text="</script><script>window.ran=1</script><!--")
    (run,) = open_runs([tmp_path / "run"])
    file = tmp_path / "shared.html"
    file.write_text(exported_page(run, 1), encoding="utf-8")
    with listened(browser, file.as_uri(), offline=True) as (page, said):
        page.goto(file.as_uri())
        page.wait_for_selector(".lists")
        page.click('[aria-label="Completions"] [data-index="1"]')
        page.wait_for_selector(".tok.at")
        page.keyboard.press("ArrowRight")
        page.wait_for_selector(".reason:has-text('kept'), .reason:has-text('masked')")
        assert page.evaluate("window.ran") is None and said == []
        page = page.context.new_page()
        page.on("pageerror", lambda error: said.append(str(error)))
        page.set_content('<iframe sandbox="allow-scripts" width="1200" height="700"></iframe>')
        page.eval_on_selector("iframe", "(frame, text) => { frame.srcdoc = text; }", file.read_text())  # as W&B does
        frame = page.frame_locator("iframe")
        frame.locator(".lists").wait_for()
        frame.locator("th, [role=columnheader]").first.click()  # the order is written into the address
        frame.locator('[aria-label="Completions"] [data-index="1"]').click()
        frame.locator(".tok.at").wait_for()
        lacks = "no server: no search, notes or further steps; no storage: the theme is not kept; no history"
        assert frame.locator("#missing").inner_text().startswith(f"This frame has {lacks}")
        assert said == []


def test_with_the_server_of_the_command(browser, tmp_path):
    """The same views, answered by `proxima view` itself: what the page shows is what the Parquet file has."""
    from tests.view.microscope.stored_run import make_step

    for name in ("a", "b"):
        make_step(tmp_path / name, SURROGATES["cppo"](), prompts=2, samples=3)
    options = ["--port", "0", "--key", "secret", "--no-browser"]
    command = [sys.executable, "-m", "proxima.cli.main", "view", str(tmp_path), *options]
    with WarmPopen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = re.search(r"http://.*:\d+/", process.stdout.readline())[0]
            with listened(browser, address) as (page, said):
                walk(page, address)
            assert [line for line in said if line != "about:blank"] == []
        finally:
            process.terminate()


def walk(page, address):
    """Every view of the run at an address, and the reason of a token as the server gives it."""
    for route in ("", "0", "0/step/1", "0/step/1/group/1", "0/step/1/completion/1.2.0?t=0"):
        page.goto("about:blank")
        page.goto(f"{address}?key=secret#/{route}")
        page.wait_for_selector("#view > *")
        assert page.locator("[role=alert]:not(:empty)").count() == 0, route
    page.wait_for_selector(".reason")
    answer = json.loads(page.evaluate("fetch('/api/0/step/1/completion/1.2.0/token/0').then((one) => one.text())"))
    page.wait_for_selector(f".reason:has-text('{answer['reason'][:12]}')")
    assert answer["reason"] in page.inner_text(".reason")
    page.goto(f"{address}?key=secret#/0/compare?step=1&c=1.2.0&run2=1&step2=1")
    page.wait_for_selector("text=The tokens are the same.")
