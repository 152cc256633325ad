"""Measure `proxima view` in Chromium: first paint of a large step, its filters, a long answer, the server's memory."""

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, Popen
from subprocess import run as run_process
from typing import Any

from benchmarks.harness import CACHE, HERE, Spread, finish, need_model, parser, table
from benchmarks.view.beside import beside
from benchmarks.view.session import STEPS, Served, session

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
    p.add_argument("--seconds", type=float, default=60, help="of the session (default: %(default)s)")
    p.add_argument("--steps", type=int, default=20, help="of the training with an open page (default: %(default)s)")
    p.add_argument("--only", choices=["timings", "session", "training"], help="of the three measurements")
    o = p.parse_args()
    model = need_model(o.model)
    result: dict[str, Any] = {"claim": "view", "shape": o.shape, "long": o.long}
    if o.only != "training":
        result |= served(o, model)
    if o.only in (None, "training"):
        result["training"] = beside(model, o.steps, o.threads)
        ratio, error = (result["training"][name] for name in ("ratio", "standard_error"))
        print(f"\nA step beside an open page takes {ratio:.4f} ± {error:.4f} of its time, {o.steps} pairs")
        share, cpu = (result["training"][name] for name in ("server_over_training", "cpu_seconds"))
        print(f"The server takes {share:.2%} of the training's CPU time; CPU seconds: {cpu}")
    finish(result, o.json_out)


def served(o: Namespace, model: str) -> dict[str, Any]:
    """Measure the timings in a browser, and the memory over a session."""
    completions, tokens = map(int, o.shape.split("x"))
    result: dict[str, Any] = {}
    with server([made_run(completions, tokens, model), made_run(8, o.long, model)]) as (process, address):
        if o.only in (None, "timings") and shutil.which("chromium") and find_spec("playwright"):
            seconds = {name: Spread(values) for name, values in timings(address, o.repeats).items()}
            result |= {"seconds": {name: spread.json() for name, spread in seconds.items()}, "limits": LIMITS}
            rows = [[name, spread.text(".3f"), f"{LIMITS.get(name, '')}"] for name, spread in seconds.items()]
            print(f"{o.shape} tokens; an answer of {o.long:,}; seconds, median [min-max] of {o.repeats}\n")
            print(table(["what", "seconds", "at most"], rows))
        if o.only in (None, "session"):
            result |= remembered((process.pid, address), model, o.seconds)
    return result


def remembered(stored: Served, model: str, seconds: float) -> dict[str, Any]:
    """Return the memory over a session with a second server that has weights; if the session ends early, what it has
    read so far."""
    readings: list[dict[str, Any]] = []
    run, ended = made_run(32, 128, model, STEPS), ""
    for step in STEPS:
        place = run / "checkpoints" / f"{step:06d}" / "model"
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            place.symlink_to(Path(model).resolve())
    with server([run], "--recompute") as (process, address):
        try:
            session(stored, (process.pid, address), seconds, readings)
        except (Exception, KeyboardInterrupt) as error:
            ended = f"{type(error).__name__}: {error}"[:300]
            print(f"The session ended early: {ended}", file=sys.stderr)
    for name in readings[0]["mb"] if readings else ():
        for part, kind in enumerate(("resident", "proportional")):
            tenths = [reading["mb"][name][part] for reading in readings][:: -(-len(readings) // 10)]
            print(f"\nMemory, {name}, {kind}, MB, over {readings[-1]['requests']:,} requests: {tenths}")
    return {"session_seconds": seconds, "memory": readings} | ({"session_ended_by": ended} if ended else {})


def made_run(completions: int, tokens: int, model: str, steps: Sequence[int] = (1,)) -> Path:
    """Return a run folder with steps of random tokens, created once below .cache/."""
    place = CACHE / f"view-{completions}x{tokens}"
    if not place.exists():
        making = place.with_suffix(".making")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(making, ignore_errors=True)
        words = ["-m", "tests.view.microscope.stored_run", str(making), str(completions), str(tokens), model]
        run_process([sys.executable, *words, *map(str, steps)], check=True, cwd=HERE.parent)
        making.rename(place)
    return place


@contextmanager
def server(runs: list[Path], *options: str) -> Iterator[tuple[Popen[str], str]]:
    """Run `proxima view` in its own process, and yield the process and its address."""
    command = [
        sys.executable,
        "-m",
        "proxima.cli.main",
        "view",
        *map(str, runs),
        "--port",
        "0",
        "--no-browser",
        *options,
    ]
    process = Popen(command, stdout=PIPE, text=True, cwd=HERE.parent)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[0].partition("#")[0]
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
