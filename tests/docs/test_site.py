"""The site of the pages: built without a warning, it needs no server and no other address, on a phone as on a desk."""

import importlib.util
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import pytest

import proxima.core
from docs.site.docstrings import as_rst

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGES = (
    "README",
    "docs/index",
    "docs/commands",
    "docs/reference",
    "docs/environments",
    "docs/algorithms/cppo",
    "docs/site/api/surrogate",
)
LINKS = "tests/docs/test_docs.py::test_links_lead_somewhere"


def converted(text):
    lines = text.split("\n")
    as_rst(lines)
    return "\n".join(lines).strip()


def test_sections_of_a_docstring_are_fields():
    """What is special in reStructuredText stands in formulas, sums and names of ours."""
    text = converted(
        "Bound |pi - mu| of `w_t`s.\n\n    D_t = |pi - mu|\n\nArgs:\n    b, c: [N], nats;\n        second line.\n"
        "Returns: TokenLoss.\nEdge cases: A * r = 0\n    is kept.\nSource: D. Knuth.\nTwo\nlines."
    )
    assert text == (
        "Bound \\|pi - mu\\| of \\ ``w_t``\\ s.\n\n::\n\n    D_t = |pi - mu|\n\n"
        ":param b,\u200bc: [N], nats; second line.\n:Returns: TokenLoss.\n"
        ":Edge cases: A \\* r = 0 is kept.\n:Source: \\D. Knuth.\n\nTwo lines."
    )
    assert converted("Takes it.\n\nneeds: what it reads;\n    more\nunit: a word") == (
        "Takes it.\n\n:param needs: what it reads; more\n:param unit: a word"
    )
    assert converted("See `policy_loss` and $r_t$.") == (
        "See \\ :py:obj:`policy_loss <proxima.core.loss.policy_loss>`\\  and \\ :math:`r_t`\\ ."
    )
    assert converted("Core: the mathematics.") == "Core: the mathematics."


def test_the_pages_of_the_api_have_every_module_of_core():
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/site/api").glob("*.rst"))
    modules = [module.name for module in pkgutil.walk_packages(proxima.core.__path__, "proxima.core.")]
    assert set(re.findall(r"automodule:: (proxima\.core\.\S+)", pages)) == set(modules)


def test_a_page_that_moved_is_gone_and_its_new_place_is_named():
    rows = re.findall(r"^\| `(.+)` \| \[(.+)\]\((.+)\) \|$", (ROOT / "docs/site/moved.md").read_text(), re.MULTILINE)
    assert len(rows) >= 30
    for old, name, target in rows:
        assert not (ROOT / old).exists(), old
        assert os.path.normpath(f"docs/site/{target}") == name


class Tags(HTMLParser):
    """The tags of a page, with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def build(source, folder, *options):
    """Builds the site of the pages in a folder, as `make site` does."""
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("needs the extra site")
    made = re.search(r"^SITE := \S+ (.*) -d \S+$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    command = [sys.executable, *made.split(), *options, "-d", f"{folder}/trees", source, f"{folder}/site"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.campaign(LINKS)
def test_a_link_that_leads_nowhere_is_an_error_and_a_formula_needs_no_script(tmp_path):
    (tmp_path / "gone.md").write_text("# Page\n\n[a page](old.md), [a place](#none), ![a picture](none.svg)\n")
    (tmp_path / "math.md").write_text("# Ratio\n\nThe ratio $r_t$.\n\n$$\n\\frac{\\pi}{\\mu}\n$$\n", encoding="utf-8")
    done = build(str(tmp_path), tmp_path, "-D", "root_doc=gone", "-D", "include_patterns=gone.md,math.md")
    assert done.returncode == 1
    assert all(f"gone.md:3: WARNING: {words}" in done.stderr for words in ("'myst'", "image file")), done.stderr
    assert all(f"'{target}'" in done.stderr for target in ("old.md", "none"))
    text = re.sub(r"\s", "", (tmp_path / "site/math.html").read_text(encoding="utf-8"))
    assert "<msub><mi>r</mi><mi>t</mi></msub>" in text and "<mfrac>" in text


@pytest.mark.campaign(LINKS)
def test_the_site(tmp_path):
    """One test, so that one process builds the site, once."""
    done = build(".", tmp_path)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    loads_nothing_from_other_addresses(site)
    has_every_public_name_of_core(site)
    leads_from_old_pages_to_new_ones(site)
    if not (CHROMIUM and importlib.util.find_spec("playwright")):
        pytest.skip("the site is built; to look at it needs Chromium and playwright")
    is_readable_in_a_browser(site)


def loads_nothing_from_other_addresses(site):
    """What a page loads is in the folder, and every picture has a text."""
    pages = [page for page in site.rglob("*.html") if "_static" not in page.parts]
    assert len(pages) > 100
    for page in pages:
        for tag, attributes in Tags(page.read_text(encoding="utf-8")).tags:
            loaded = attributes.get("src") or (attributes.get("href") if tag == "link" else None)
            if loaded and not loaded.startswith(("#", "data:")):
                assert not re.match(r"(https?:)?//", loaded), (page, loaded)
                assert (page.parent / loaded.partition("?")[0]).is_file(), (page, loaded)
            if tag == "img":
                assert attributes.get("alt", "").strip(), (page, attributes)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def has_every_public_name_of_core(site):
    text = "".join(page.read_text(encoding="utf-8") for page in (site / "docs/site/api").glob("*.html"))
    public = [getattr(proxima.core, name) for name in proxima.core.__all__]
    places = [f"{one.__module__}.{one.__qualname__}" for one in public if hasattr(one, "__qualname__")]
    assert len(places) > 40
    assert [place for place in places if f'id="{place}"' not in text] == []


def leads_from_old_pages_to_new_ones(site):
    text = (site / "docs/migration.html").read_text(encoding="utf-8")
    assert 'content="0; url=../packages/proxima-peers/docs/migration.html"' in text
    leads = [page for page in (site / "index.html", *site.glob("docs/*.html")) if "refresh" in page.read_text()]
    assert len(leads) > 30
    for page in leads:
        (target,) = re.findall(r'http-equiv="refresh" content="0; url=([^"#]+)', page.read_text(encoding="utf-8"))
        assert (page.parent / target).is_file(), page


def is_readable_in_a_browser(site):
    """From its folder, without a network: no text is cut off, axe-core finds nothing serious, search finds words."""
    from playwright.sync_api import sync_playwright

    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], env=kept)
        for width, scheme in product((390, 1280), ("light", "dark")):
            look_at(launched.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme), site)
        page = launched.new_page()
        page.set_default_timeout(300_000)
        for word, place in (("veto", "mismatch.html"), ("bubblewrap", "rewards.html")):
            page.goto(f"{site.as_uri()}/docs/index.html")
            page.keyboard.press("Control+k")
            page.keyboard.type(word + "\n")
            page.locator(f'#search-results a[href*="docs/{place}"]').first.wait_for()
        finds_sections_and_fields(page, site)
        launched.close()


def finds_sections_and_fields(page, site):
    """By a name and by words, each with its page and a piece of its text; no guide comes after the history."""
    asked = {
        "reward model": ("docs/classic.html#", "docs/rewards.html#a-reward-model"),
        "most new tokens": ("docs/reference.html#sampling:~:text=sampling.max_tokens",),
        "max_tokens": ("docs/reference.html#sampling:~:text=sampling.max_tokens",),
    }
    for words, places in asked.items():
        page.goto(f"{site.as_uri()}/search.html?q={words.replace(' ', '+')}")
        page.locator("#search-results li").first.wait_for()
        found = page.locator("#search-results li a").evaluate_all("all => all.map((one) => one.getAttribute('href'))")
        assert all(any(address.startswith(place) for address in found[:4]) for place in places), (words, found[:4])
        assert not found[0].startswith("CHANGELOG")
        assert page.locator("#search-results li p mark").first.inner_text().lower() in words


def look_at(context, site):
    page, said = context.new_page(), []
    page.set_default_timeout(300_000)
    page.on("request", lambda request: said.append(request.url))
    page.on("pageerror", lambda error: said.append(str(error)))
    axe = Path(importlib.util.find_spec("axe_playwright_python").origin).parent / "axe.min.js"
    for name in PAGES:
        page.goto(f"{site.as_uri()}/{name}.html")
        assert page.evaluate(CUT_OFF) == [], name
        assert "`" not in page.locator("nav[aria-label=Pages]").text_content(), name
        hidden = page.locator(".commands pre").evaluate_all(
            "all => all.map((one) => one.scrollWidth - one.clientWidth)"
        )
        assert max(hidden, default=0) <= 0, name
        page.evaluate(axe.read_text(encoding="utf-8"))
        found = page.evaluate("axe.run({preload: false}).then((result) => result.violations)")
        assert [one for one in found if one["impact"] in ("serious", "critical")] == [], name
    assert [words for words in said if not words.startswith(("file:", "data:"))] == []
    context.close()


#: What ends beyond the window, in no box that scrolls.
CUT_OFF = """() => {
  const scrolls = (one) => one && (/auto|scroll/.test(getComputedStyle(one).overflowX) || scrolls(one.parentElement));
  const texts = document.createTreeWalker(document.querySelector("main article"), NodeFilter.SHOW_TEXT), cut = [];
  while (texts.nextNode()) {
    const range = document.createRange();
    range.selectNodeContents(texts.currentNode);
    const { right, width } = range.getBoundingClientRect(), parent = texts.currentNode.parentElement;
    if (width && right > innerWidth + 1 && !scrolls(parent)) cut.push(texts.currentNode.textContent);
  }
  return cut;
}"""
