"""The page in a browser: every view, by keyboard alone, on a phone, in the dark, with hostile text, and in one file."""

import importlib.util
import math
import os
import re
import shutil
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from proxima.core.surrogate import SURROGATES
from proxima.data.flow import EVAL_UID, Completion, Group, Prompt, Score
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import write_evals
from proxima.view.microscope.app import read_notes
from proxima.view.microscope.exported_page import exported_page
from proxima.view.microscope.server import open_runs
from tests.campaigns import campaign
from tests.processes import eventually
from tests.view.microscope.page_runs import COPY, EVIL, LIVE, LONG, LONGEST_NAME, NEW, OTHER, WORDS, make_runs
from tests.view.microscope.stored_run import HOSTILE, make_step, served
from tests.view.synthetic import record

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PLAYWRIGHT = importlib.util.find_spec("playwright")
needs_browser = pytest.mark.skipif(not (CHROMIUM and PLAYWRIGHT), reason="needs Chromium and playwright")
pytestmark = needs_browser
ROUTES = {
    "runs": "",
    "trend": "0",
    "step": "0/step/3",
    "group": "0/step/3/group/3",
    "played": "0/step/3/group/4",
    "completion": "0/step/3/completion/3.1.0",
    "episode": "0/step/3/completion/3.2.1?tint=policy_version",
    "compare": "0/compare?step=1&c=3.1.0&run2=1&step2=3",
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The run folders, and the address of their server."""
    folders = make_runs(tmp_path_factory.mktemp("runs"))
    with served(folders) as port:
        yield SimpleNamespace(folders=folders, address=f"http://127.0.0.1:{port}/")


#: How many views it has shown.
SHOWN = "performance.getEntriesByType('mark').length"
#: What a view draws when it is in sight is there: its observers are told before this one.
DRAWN = "new Promise((told) => new IntersectionObserver(told).observe(document.body)).then(() => null)"


@contextmanager
def opened(browser, runs, refused=False, **options):
    """A page at the server; at the end nothing was said in its console, and nothing failed, but what the browser
    itself says of a request that was `refused`."""

    def visit(name):
        """Only the first loads the page: from one view to another, as a link does."""
        before = page.evaluate(SHOWN)
        page.goto(f"{runs.address}#/{ROUTES.get(name, name)}")
        eventually(lambda: page.wait_for_timeout(10) or page.evaluate(SHOWN) != before, said)
        page.evaluate(DRAWN)

    with listened(browser, runs.address, **options) as (page, said):
        page.visit = visit
        yield page
    refusals = [line for line in said if "server responded with a status of 404" in line]
    assert bool(refusals) == refused
    assert [line for line in said if line not in refusals] == []


@pytest.fixture
def page(browser, runs):
    with opened(browser, runs) as page:
        yield page


@pytest.fixture(scope="module")
def rows(runs):
    """What the third step of the first run has in its file."""
    return pq.read_table(runs.folders[0] / "rollouts" / "000003.parquet").to_pylist()


def row_of(rows, *key):
    (row,) = (row for row in rows if (row["prompt_uid"], row["sample"], row["turn"]) == key)
    return row


def number(text, name):
    """A number of the inspector's tables."""
    return float(re.search(rf"^{name}\t(\S+)", text, re.MULTILINE)[1].replace("−", "-"))


@pytest.mark.slow
def test_the_way_down_by_clicks(page, rows):
    page.visit("runs")
    assert page.locator(".runs .bad").inner_text().startswith("✕ 000001.parquet has no keep: it is </script>")
    page.click("text=quickstart >> nth=0")
    page.wait_for_selector(".charts svg")
    assert page.locator(".charts figure").count() == len(record(1, 3))  # two are no metrics; two are the run's own
    assert "held-out accuracy 0.25 → 0.75" in page.inner_text(".where")
    *titles, rest = page.locator("section:has(> .charts) > h2").all_inner_texts()
    assert titles[:3] == ["Vital signs", "Rewards", "Prompts and completions"] and rest == "Other"
    first = page.locator(".charts figure").first.inner_text()
    assert first.startswith("reward/mean") and "mean over the valid completions generated in the step" in first
    assert page.locator('figure[data-name="mismatch/k3_kl"] output').inner_text() == "0.03 watch"
    assert page.locator(".charts .verdict").count() == 1
    page.locator(".charts svg").first.click(position={"x": 3, "y": 40})
    page.wait_for_url("**#/0/step/1*")
    page.wait_for_selector(".fates button")
    assert page.locator(".fates button").all_inner_texts()[0].startswith("trained")
    assert page.locator(".strip .verdict.watch").all_inner_texts() == ["watch"]
    page.click('[aria-label^="Groups"] [data-index="0"]')
    page.wait_for_url("**/group/*")
    page.wait_for_selector(".columns article .differs")
    assert page.locator(".columns article").count() == 8
    page.click(".columns article >> nth=1 >> a")
    page.wait_for_url("**/completion/*.1.0*")
    page.wait_for_selector(".tok.at")
    page.visit("completion")
    with page.expect_response("**/token/5*") as told:
        page.click(".tokens .tok >> nth=5")
    page.wait_for_url("**t=5*")
    told, row = told.value.json(), row_of(rows, 3, 1, 0)
    page.wait_for_selector(f".reason:has-text('{told['reason']}')")
    shown = page.inner_text(".inspector")
    assert number(shown, "π current") == pytest.approx(row["log_prob"][5], rel=1e-4)
    assert number(shown, "ratio") == pytest.approx(told["ratio"], rel=1e-4)
    assert number(shown, "threshold") == pytest.approx(told["band"]["threshold"], rel=1e-4)
    share = re.search(r"^π current\t\S+\t(\S+) %", shown, re.MULTILINE)[1]
    assert float(share) == pytest.approx(100 * math.exp(row["log_prob"][5]), abs=0.06)
    for text in (f"“{told['top_k'][2]['text']}”", "not stored; --recompute"):
        assert text in shown
    page.click("#crumbs >> text=step 3")
    page.wait_for_selector(".fates button")


@pytest.mark.slow
def test_tokens_are_counted_from_1(page, rows):
    page.visit("0/step/3/completion/3.2.1?t=0")
    page.wait_for_selector(".tok.at")
    length = len(row_of(rows, 3, 2, 1)["tokens"])
    assert f"token 1 of {length}" in page.inner_text(".inspector")
    assert "token 1" in page.inner_text(".band figcaption > output")
    page.keyboard.press("End")
    assert f"token {length} of {length}" in page.inner_text(".inspector")
    slider = page.locator(".band [role=slider]")
    values = [slider.get_attribute(f"aria-value{name}") for name in ("min", "now", "max")]
    assert values == ["1", str(length), str(length)]
    other = page.locator(".graph a[href]").first.get_attribute("aria-label")
    assert other.startswith(f"another path from token {length // 4 + 4}")  # 3 tokens of its second message are shared
    page.visit("compare")
    page.wait_for_selector(".pair .tok.at")
    assert page.locator(".compare thead th").first.inner_text() == f"token {OTHER + 1}"


@pytest.mark.slow
def test_groups_say_how_many_completions_were_trained(page, rows):
    page.visit("step")
    page.wait_for_selector(".fates button")
    shown = page.locator('[aria-label^="Groups"] .space .row > :last-child').all_inner_texts()
    trained = [row["prompt_uid"] for row in rows if row["outcome"] == "trained"]
    sizes = Counter(row["prompt_uid"] for row in rows)
    assert sorted(shown) == sorted(f"{trained.count(uid)}/{size}" for uid, size in sizes.items())
    assert "used" not in page.inner_text(".lists")


CUT = "tests/view/microscope/test_page.py::test_a_question_is_cut_only_where_its_row_is_full"


@pytest.mark.slow
@pytest.mark.parametrize("width", [1000, *campaign(CUT, [1280, 1600])])
def test_a_question_is_cut_only_where_its_row_is_full(width, browser, runs):
    with opened(browser, runs, viewport={"width": width, "height": 800}) as page:
        page.visit("step")
        page.wait_for_selector(".space .row")
        cut = "all => all.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent)"
        assert page.locator(".row.head > div, .row > div:first-child").evaluate_all(cut) == []
        assert page.locator(".list").evaluate_all("all => all.map((one) => one.scrollWidth - one.clientWidth)") == [
            0,
            0,
        ]


@pytest.mark.slow
def test_a_chart_cuts_neither_its_name_nor_its_numbers(page):
    page.visit("0")
    page.locator(f'[data-name="{LONGEST_NAME}"]').scroll_into_view_if_needed()
    page.wait_for_selector(f'[data-name="{LONGEST_NAME}"] svg')
    outside = page.locator(".charts svg text").evaluate_all(OUTSIDE)
    assert outside == [] and "−0.000123" in page.locator(f'[data-name="{LONGEST_NAME}"] svg').text_content()
    cut = "all => all.filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent)"
    assert page.locator(".charts figcaption, .charts figcaption > *").evaluate_all(cut) == []


#: Texts that reach beyond their chart.
OUTSIDE = """all => all.filter((one) => {
  const box = one.getBoundingClientRect(), chart = one.closest("svg").getBoundingClientRect();
  return box.left < chart.left || box.right > chart.right || box.top < chart.top || box.bottom > chart.bottom;
}).map((one) => one.textContent)"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_no_text_crosses_its_bar_and_the_samples_of_a_group_wrap(width, browser, runs):
    with opened(browser, runs, viewport={"width": width, "height": 800}) as page:
        page.visit("step")
        page.wait_for_selector(".fates button")
        assert page.locator(".fates span").evaluate_all(CROSSING) == []
        page.visit("group")
        page.wait_for_selector(".columns article .differs")
        sides = "[box.left, box.right, box.top, box.bottom]"
        boxes = f"all => all.map((one) => one.getBoundingClientRect()).map((box) => {sides})"
        cards = page.locator(".columns article").evaluate_all(boxes)
        assert len(cards) == 9 and all(0 <= left < right <= width for left, right, _, _ in cards)
        rows = sorted({top for _, _, top, _ in cards})
        assert len(rows) == (9 if width == 390 else 3)
        for above, below in pairwise(rows):
            assert max(bottom for _, _, top, bottom in cards if top == above) <= below


#: Texts that the bar of their row begins or ends in.
CROSSING = """all => all.filter((one) => {
  const text = one.getBoundingClientRect(), bar = one.parentElement.querySelector("i").getBoundingClientRect();
  const beside = bar.right <= text.left || bar.left >= text.right || bar.right >= text.right && bar.left <= text.left;
  return !beside && bar.top < text.bottom && bar.bottom > text.top;
}).map((one) => one.textContent)"""


@pytest.mark.slow
def test_held_out_questions_are_filtered_to_those_that_are_still_wrong(browser, tmp_path):
    make_step(tmp_path, SURROGATES["cppo"](), prompts=1, samples=1)
    for step, right in ((0, {0, 1}), (1, {1, 2})):
        write_evals(
            RunFolder(tmp_path).eval_file(step, "held-out"), step, [asked(row, row in right) for row in range(5)]
        )
    with served([tmp_path]) as port, listened(browser, f"http://127.0.0.1:{port}/") as (page, said):
        page.goto(f"http://127.0.0.1:{port}/#/0/held-out")
        page.wait_for_selector(".held-out article")
        about = page.locator(".held-out article > .muted").all_inner_texts()
        assert [text.split(" · ")[0].removeprefix("held-out question ") for text in about] == list("03421")
        assert "1 got worse, 2 still wrong, 1 got better, 1 still right" in page.inner_text(".page")
        page.select_option("select", label="2 still wrong")
        assert page.locator(".held-out h2").all_inner_texts() == ["3 + 1?", "4 + 1?"]
        assert str(EVAL_UID) not in page.content()
        assert said == []


def asked(row, right):
    """A held-out question that was answered right or wrong."""
    uid = EVAL_UID + row
    prompt = Prompt(uid=uid, messages=({"role": "user", "content": f"{row} + 1?"},), tokens=(1,), answer=row + 1)
    score = Score(value=float(right), correct=right)
    return Group(prompt=prompt, completions=(Completion.of_text(uid, 0, "so", [1]),), scores=(score,))


@pytest.mark.slow
def test_a_completion_has_no_empty_panel(page):
    page.visit("0/step/3/completion/0.1.0")  # its advantage is 0: no forward pass
    page.wait_for_selector(".tok.at")
    assert not page.locator(".band").is_visible()  # nothing varies along the answer
    height = "(one) => one.getBoundingClientRect().height"
    assert page.locator(".tokens").evaluate(height) <= page.locator(".piece").evaluate(height) * 1.6
    page.visit("0/step/3/completion/0.3.0")
    page.wait_for_selector("text=no tokens")
    assert not page.locator(".band").is_visible() and not page.locator(".inspector").is_visible()


@pytest.mark.slow
def test_in_a_frame_of_another_page_it_says_what_is_missing(browser, runs):
    page = browser.new_context().new_page()
    page.set_content("<iframe width=900 height=500></iframe>")
    frame = page.frame_locator("iframe")

    def shown_in(sandbox):
        page.eval_on_selector("iframe", "(frame, text) => { frame.sandbox = text; }", sandbox)
        place = f"{runs.address}?{sandbox.replace(' ', '+')}#/0"
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


@pytest.mark.slow
def test_by_keyboard_alone(page):
    page.visit("0")
    press = page.keyboard.press
    page.wait_for_selector(".charts svg")
    press("ArrowLeft")
    press("Enter")
    page.wait_for_url("**#/0/step/2*")
    page.wait_for_selector(".lists")
    press("ArrowDown")
    assert page.locator('[aria-label^="Groups"] .row.at').get_attribute("aria-rowindex") == "3"
    press("Enter")
    page.wait_for_url("**/group/*")
    page.wait_for_selector(".columns")
    press("ArrowRight")
    press("b")
    press("Escape")
    page.wait_for_url("**#/0/step/2*")
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
    assert page.locator(".tok.hit").count() > 0 and "therefore" in page.locator(".tok.at").text_content()
    press("Escape")
    press("?")
    assert "next masked token" in page.inner_text("dialog")
    press("Escape")
    press("n")
    page.wait_for_url("**/completion/*.2.0*")
    page.wait_for_selector(".tok.at")
    press("Backspace")
    page.wait_for_url("**/group/*")


@pytest.mark.slow
def test_filters_and_histogram(browser, runs, rows):
    with opened(browser, runs, refused=True) as page:
        page.visit("step")
        shown = page.locator('section:has([aria-label="Completions"]) h2 span')
        page.keyboard.press("h")
        page.keyboard.press("ArrowLeft")  # the last bar
        right = sum(row["reward"] == 1 for row in rows)
        assert shown.inner_text() == f"{right} of 65" and "reward_from=1" in page.url
        page.keyboard.press("Escape")
        assert shown.inner_text() == "65 of 65"
        page.click(".fates button >> nth=1")
        name = page.locator(".fates button >> nth=1").get_attribute("data-name")
        assert shown.inner_text() == f"{sum(row['outcome'] == name for row in rows)} of 65"
        page.click("text=clear")
        page.fill('[aria-label="length, at least"]', "100")
        page.wait_for_url("**length_from=100*")
        assert (
            shown.inner_text() == f"{sum(sum(row['sampled'] or [1] * len(row['tokens'])) >= 100 for row in rows)} of 65"
        )
        page.click("text=clear")
        page.fill('[aria-label="Text of the answers"]', "nothing")
        page.wait_for_selector("text=no completion passes the filters")
        assert shown.inner_text() == "0 of 65"
        page.check("text=regex")
        page.fill('[aria-label="Text of the answers"]', "(")
        page.wait_for_selector("[role=alert]:has-text('missing )')")
        page.visit("0/step/3?outcome=invalid")  # an address has its filters
        assert shown.inner_text() == "1 of 65"


@pytest.mark.slow
def test_tints_have_signs_beside_colour(page, rows):
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
    assert other.get_attribute("href") == "#/0/step/3/completion/3.2.0"
    assert other.get_attribute("aria-label").startswith("another path from token ")
    assert "calls search, reward +0.25" in nodes.first.get_attribute("aria-label")
    page.locator(".graph [role=button] >> nth=1").focus()
    page.keyboard.press("Enter")  # the tool's answer: its first token
    page.wait_for_url(f"**t={len(row_of(rows, 3, 2, 1)['tokens']) // 4}*")


@pytest.mark.slow
def test_episodes_of_a_group_are_read_turn_by_turn(page):
    page.visit("0/step/3/group/4")
    cards = page.locator(".columns article")
    assert cards.count() == 8 and page.locator(".columns button").count() == 0  # no words to compare
    said = cards.first.locator(".turns li").all_inner_texts()
    assert [text.split()[0] for text in said] == ["turn", "tool", "turn", "✕", "turn"]
    assert "turn 0 reward +0.25" in said[0] and "→ search(query=sum of 1 and 2)" in said[0]
    assert "unreadable call: no closing brace" in said[2]
    said = "reward of the episode +1 · ended by the limit of turns · begun 2 times"
    assert f"{said} · time queued 12.5 s, own 3.25 s, the policy's 60 s" in cards.first.inner_text()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_url("**/completion/4.1.0*")


def test_a_chart_that_is_not_drawn_yet_has_its_place_and_its_number(page):
    page.visit("0?step=1")  # not the last, whose numbers are others
    cards = page.locator(".charts figure")
    shown = (
        "cards => cards.map((card) => [card.getBoundingClientRect().height, card.querySelector('output').innerText])"
    )
    last, before = cards.last.locator("svg"), cards.evaluate_all(shown)
    assert last.count() == 0
    cards.last.scroll_into_view_if_needed()
    last.wait_for()
    assert cards.evaluate_all(shown) == before
    page.keyboard.press("ArrowRight")
    assert [height for height, _ in cards.evaluate_all(shown)] == [height for height, _ in before] != []


@pytest.mark.slow
def test_compare_marks_the_first_difference(page, rows):
    page.visit("compare")
    assert f"First difference at token {OTHER + 1}:" in page.inner_text(".compare .bar")
    assert page.locator(".pair .tok.first").count() == 2
    other = row_of(rows, 3, 1, 0)["tokens"][OTHER]
    assert page.locator(".pair .tok.first >> nth=1").text_content().strip() == WORDS[other].strip()
    page.visit("0/compare?step=1&c=3.1.0&run2=1&step2=1")
    assert "The tokens are the same." in page.inner_text(".compare .bar")
    page.visit("completion")
    page.click(".further button")
    page.wait_for_url("**/compare*")


@pytest.mark.slow
def test_a_note_is_saved_and_listed(page, runs):
    page.visit(f"{COPY}/step/3/completion/3.1.0?t=7")
    page.click(".note summary")
    page.fill(".note textarea", "why <b>this</b> one?")
    page.click("text=save the note")
    page.wait_for_selector("text=note ●")
    assert read_notes(runs.folders[COPY]) == {"step/3/completion/3.1.0?t=7": "why <b>this</b> one?"}
    page.visit(str(COPY))
    assert page.inner_text(".notes a") == "step/3/completion/3.1.0, token 8"
    page.click(".notes a")
    page.wait_for_url("**/completion/3.1.0?t=7*")
    page.wait_for_selector(".note[open]")
    assert page.input_value(".note textarea") == "why <b>this</b> one?"


@pytest.mark.slow
def test_a_running_step_appears_by_itself(page, runs):
    page.visit(str(LIVE))
    page.wait_for_selector("#live:has-text('step 1')")
    make_step(runs.folders[LIVE], SURROGATES["cppo"](), prompts=1, samples=1, step=2)
    page.wait_for_selector("button:has-text('open step 2')")
    page.wait_for_selector("#live:has-text('step 2')")


LOOKS = {"phone": {"viewport": {"width": 360, "height": 740}}, "desk": {}, "dark": {"color_scheme": "dark"}}


FIRST = ("trend", "completion")  # the views that `make test` reads
READ = "tests/view/microscope/test_page.py::test_every_view_can_be_read"


@pytest.mark.slow
@pytest.mark.parametrize("look", ["phone", *campaign(READ, ["desk", "dark"])])
@pytest.mark.parametrize("route", [*FIRST, *campaign(READ, [route for route in ROUTES if route not in FIRST])])
def test_every_view_can_be_read(route, look, browser, runs):
    """No view is wider than the window; names, roles and contrast by axe-core, where it is installed."""
    with opened(browser, runs, **LOOKS[look]) as page:
        page.visit(route)
        page.wait_for_timeout(150)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert page.locator("[role=alert]:not(:empty)").count() == 0
        assert page.evaluate(UNNAMED) == []
        assert serious(page) == []


@pytest.mark.slow
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


@pytest.mark.slow
def test_hostile_text_is_shown_and_does_nothing(page):
    def visit(route):
        page.visit(route)
        page.wait_for_timeout(100)
        assert page.evaluate("window.ran") is None
        assert page.locator("img, script:not([src]), svg[onload]").count() == 0

    for route in ROUTES.values():
        visit(route.replace("0", str(EVIL), 1).replace("run2=1", f"run2={EVIL}"))
    visit(f"{EVIL}/step/3/group/7")  # with the error of a score
    visit(f"{EVIL}/step/3/completion/3.1.0")
    page.wait_for_selector(".reason:has-text('onerror')")
    assert "</script><script>window.ran=1</script>" in page.inner_text(".tokens")
    visit(str(EVIL))
    page.wait_for_selector(".notes li p")
    assert page.inner_text(".notes li p") == "<script>window.ran=5</script>"


@pytest.mark.slow
def test_long_answers_and_many_completions_draw_what_is_in_sight(page):
    page.visit(f"{LONG}/step/1")
    assert "1,000 of 1,000" in page.inner_text(".lists")
    assert page.locator(".space .row").count() < 150
    page.keyboard.press("c")
    page.keyboard.press("End")
    assert page.locator('[aria-label="Completions"] .row.at').get_attribute("aria-rowindex") == "1001"
    page.visit(f"{LONG}/step/1/completion/0.1.0")
    page.wait_for_selector(".tok.at")
    assert page.locator(".tok").count() < 6000
    page.keyboard.press("End")
    page.wait_for_url("**t=31999*")
    assert page.locator(".tok.at").is_visible()
    assert page.locator(".tokens").text_content().count("⟨") == 32_000


@pytest.mark.slow
def test_what_is_missing_is_said(browser, runs):
    with opened(browser, runs, refused=True) as page:
        page.visit("0/step/999")
        assert "step 999 has no completions here" in page.inner_text("[role=alert]")
        page.visit(str(NEW))
        page.wait_for_selector("text=no step has completions")


@pytest.mark.slow
def test_the_exported_file_needs_no_server(browser, tmp_path):
    make_step(tmp_path / "run", SURROGATES["cppo"](), text=f"{HOSTILE}<!--")
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


@pytest.mark.slow
def test_the_key_of_the_address_goes_with_each_request(browser, runs):
    asked = []
    with served(runs.folders[:2], key="secret") as port, listened(browser, f"127.0.0.1:{port}/") as (page, said):
        page.on("request", lambda request: asked.append(request.url) if "/api/" in request.url else None)
        page.goto(f"http://127.0.0.1:{port}/?key=secret#/{ROUTES['completion']}")
        page.wait_for_selector(".reason:has-text('kept:'), .reason:has-text('masked:')")
        page.goto(f"http://127.0.0.1:{port}/?key=secret#/0/compare?step=1&c=3.2.1&run2=1&step2=1")
        page.wait_for_selector("text=The tokens are the same.")
    assert said == [] and asked and all("key=secret" in url for url in asked)


def test_help_opens_wherever_no_text_is_written(page):
    page.visit("trend")
    assert page.evaluate("document.activeElement.type") == "range"  # the slider over the steps
    page.keyboard.press("?")
    page.wait_for_selector("dialog.keys[open]")
    assert "open the step" in page.inner_text("dialog.keys")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog.keys", state="detached")
    page.visit("step")
    page.locator('[aria-label="Outcome"]').focus()  # a list
    page.keyboard.press("?")
    page.wait_for_selector("dialog.keys[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog.keys", state="detached")
    page.locator('[aria-label="Text of the answers"]').focus()
    page.keyboard.press("?")
    assert page.input_value('[aria-label="Text of the answers"]') == "?" and page.locator("dialog.keys").count() == 0


def test_a_print_has_every_chart(page):
    page.visit("trend")
    drawn = page.locator(".charts figure svg")
    assert drawn.count() < page.locator(".charts figure").count()
    page.pdf()
    assert drawn.count() == page.locator(".charts figure").count()


def test_the_first_screen_has_the_learning_curves(page):
    page.visit("runs")
    curves = page.locator(".runs li").first.locator(".learning figure")
    page.wait_for_selector(".runs li .learning svg")
    assert [text.split("\n")[0] for text in curves.all_inner_texts()] == ["held-out accuracy", "reward/mean"]
    assert "0.25 → 0.75" in curves.first.inner_text()
    assert page.locator(".runs li").first.inner_text().count("finished, ") == 1


def test_masked_tokens_filter_the_completions(page, rows):
    page.visit("step")
    page.fill('[aria-label="masked, at least"]', "1")
    some = sum((row["keep"] or []).count(False) > 0 for row in rows if row["sampled"] is None)
    shown = page.locator('[aria-label="Completions"]')

    def count():
        return int(shown.get_attribute("aria-rowcount")) - 1

    eventually(lambda: page.wait_for_timeout(10) or count() < len(rows))
    assert some <= count()
    assert "answer" in shown.locator(".row.head").inner_text()
