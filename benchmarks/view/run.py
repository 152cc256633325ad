"""Measure `proxima view` in Chromium: first paint of a large step, its filters, a long answer."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, Popen
from subprocess import run as run_process
from typing import Any

from benchmarks.harness import CACHE, HERE, Spread, finish, need_model, parser, table

LIMITS = {"first paint of the step": 1.0, "filter by length": 0.3, "filter by text": 0.3, "open the long answer": 0.5}
#: Resolves after the following frame: the wanted element is in the document, and painted.
SHOWN = """(wanted) => new Promise((done) => {
  const painted = () => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() / 1000)));
  const look = () => (document.querySelector(wanted) ? painted() : requestAnimationFrame(look));
  look();
})"""
ROWS = ".lists section:last-child .space .row:not(.none)"


def main() -> None:
    p = parser(__doc__, repeats=5)
    p.add_argument("--shape", default="2048x4096", metavar="COMPLETIONSxTOKENS", help="(default: %(default)s)")
    p.add_argument("--long", type=int, default=32_000, help="tokens of an answer (default: %(default)s)")
    o = p.parse_args()
    model = need_model(o.model)
    completions, tokens = map(int, o.shape.split("x"))
    result: dict[str, Any] = {"claim": "view", "shape": o.shape, "long": o.long}
    with server([made_run(completions, tokens, model), made_run(8, o.long, model)]) as address:
        if shutil.which("chromium") and find_spec("playwright"):
            seconds = {name: Spread(values) for name, values in timings(address, o.repeats).items()}
            result |= {"seconds": {name: spread.json() for name, spread in seconds.items()}, "limits": LIMITS}
            rows = [[name, spread.text(".3f"), f"{LIMITS.get(name, '')}"] for name, spread in seconds.items()]
            print(f"{o.shape} tokens; an answer of {o.long:,}; seconds, median [min-max] of {o.repeats}\n")
            print(table(["what", "seconds", "at most"], rows))
    finish(result, o.json_out)


def made_run(completions: int, tokens: int, model: str) -> Path:
    """Return a run folder with a step of random tokens, created once below .cache/."""
    place = CACHE / f"view-{completions}x{tokens}"
    if not place.exists():
        making = place.with_suffix(".making")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(making, ignore_errors=True)
        words = ["-m", "tests.view.microscope.stored_run", str(making), str(completions), str(tokens), model]
        run_process([sys.executable, *words], check=True, cwd=HERE.parent)
        making.rename(place)
    return place


@contextmanager
def server(runs: list[Path]) -> Iterator[str]:
    """Run `proxima view` in its own process, and yield its address."""
    command = [sys.executable, "-m", "proxima.cli.main", "view", *map(str, runs), "--port", "0", "--no-browser"]
    process = Popen(command, stdout=PIPE, encoding="utf-8", errors="replace", cwd=HERE.parent)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[0].partition("#")[0]
    finally:
        process.terminate()
        process.wait()


def timings(address: str, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each action, every time in a fresh browser context."""
    from playwright.sync_api import sync_playwright

    seconds: dict[str, list[float]] = {name: [] for name in ("first, with the server's imports", *LIMITS)}
    with sync_playwright() as driver:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"], env=kept)
        for repeat in range(repeats + 1):
            context = browser.new_context(viewport={"width": 1400, "height": 860})
            page = context.new_page()
            page.goto(f"{address}#/0/step/1", wait_until="commit")
            painted = page.evaluate(SHOWN, ROWS)
            seconds["first paint of the step" if repeat else "first, with the server's imports"].append(painted)
            typed = filtered(page, '[aria-label="length, at least"]', "1")
            searched = filtered(page, '[aria-label="Text of the answers"]', "two numbers")
            page.goto("about:blank")
            page.goto(f"{address}#/1/step/1/group/0", wait_until="commit")
            page.evaluate(SHOWN, ".columns article")
            start = page.evaluate(
                f"(location.hash = '#/1/step/1/completion/0.{repeat % 8}.0', performance.now() / 1000)"
            )
            opened = page.evaluate(SHOWN, ".tokens .tok.at") - start
            if repeat:
                seconds["filter by length"].append(typed)
                seconds["filter by text"].append(searched)
                seconds["open the long answer"].append(opened)
            context.close()
        browser.close()
    return seconds


def filtered(page: Any, field: str, text: str) -> float:
    """Return the seconds from the last key to the painted rows that pass, including the pause for further keys."""
    page.evaluate(f"document.querySelectorAll('{ROWS}').forEach((row) => row.classList.add('none'))")
    start = page.evaluate(
        """([field, text]) => {
          const input = document.querySelector(field), now = performance.now() / 1000;
          input.value = text;
          input.dispatchEvent(new Event("input"));
          return now;
        }""",
        [field, text],
    )
    return float(page.evaluate(SHOWN, ROWS)) - start
