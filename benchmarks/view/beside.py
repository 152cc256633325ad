"""Alternate the steps of a training run with an open page and the same steps of a run without one."""

import os
import shutil
import signal
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

from benchmarks.harness import CACHE, Side
from proxima.view.microscope.viewer_process import ViewerProcess

STEPS = 100_000  # more than it gets to: it is stopped before
SETTINGS = [f"train.steps={STEPS}", "train.warmup_steps=0", "eval=null", "checkpoint.every=1000"]


def beside(model: str, steps: int, threads: int) -> dict[str, Any]:
    """Return the seconds of each step, alone and viewed, the ratio of their sums with its standard error over the
    pairs, and the CPU seconds of the viewed training, of the server and of the browser. The server's CPU seconds
    relative to the training's are the most that it can cost when all cores are busy; a few steps are enough to measure
    them."""
    import psutil

    places = {name: CACHE / "view-training" / name for name in ("alone", "viewed")}
    seconds: dict[str, list[float]] = {name: [] for name in places}
    with ExitStack() as stack:
        sides = {}
        for name, folder in places.items():
            settings = {"folder": str(folder), "set": [*SETTINGS, f"model.path={model}", f"runtime.threads={threads}"]}
            sides[name] = Side(name, "view.trainer", settings, threads=threads)
            stack.callback(sides[name].close)
        viewer = ViewerProcess(places["viewed"])
        stack.callback(viewer.end)
        browser = stack.enter_context(live_page(viewer.address()))
        watching = [psutil.Process(viewer.process.pid), *browser]
        parts = {"training": [sides["viewed"].process], "server": watching[:1], "browser": browser}
        cpu = dict.fromkeys(parts, 0.0)
        for pair in range(steps + 1):
            if pair == 1:
                cpu = {part: -cpu_seconds(processes) for part, processes in parts.items()}
            for name in ("alone", "viewed") if pair % 2 else ("viewed", "alone"):
                with still(watching, when=name == "alone"):
                    took = sides[name].once()["seconds"]
                if pair:
                    seconds[name].append(took)
        cpu = {part: round(cpu[part] + cpu_seconds(processes), 3) for part, processes in parts.items()}
    ratios = [viewed / alone for alone, viewed in zip(seconds["alone"], seconds["viewed"], strict=True)]
    whole = sum(seconds["viewed"]) / sum(seconds["alone"])
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    ratio = {"ratio": whole, "standard_error": error, "median_ratio": statistics.median(ratios)}
    return {name: round(value, 4) for name, value in ratio.items()} | {
        "browser": bool(browser),
        "cpu_seconds": cpu,
        "server_over_training": round(cpu["server"] / cpu["training"], 4),
        "seconds": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
    }


def cpu_seconds(processes: list[Any]) -> float:
    """Return the CPU seconds of processes and of all their descendants that are still running."""
    import psutil

    roots = [psutil.Process(each.pid) for each in processes]
    every = {process for root in roots for process in (root, *root.children(recursive=True))}
    return sum(times.user + times.system for times in (process.cpu_times() for process in every))


@contextmanager
def live_page(address: str) -> Iterator[list[Any]]:
    """Open the live page of a run in Chromium and yield the browser's processes; none without Chromium or
    Playwright."""
    if not (shutil.which("chromium") and find_spec("playwright")):
        yield []
        return
    import psutil
    from playwright.sync_api import sync_playwright

    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with sync_playwright() as driver:
        before = set(psutil.Process().children(recursive=True))
        opened = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"], env=kept)
        page = opened.new_page()
        page.goto(f"{address}#/0")
        page.wait_for_selector("#live:has-text('step')")
        started = set(psutil.Process().children(recursive=True)) - before
        yield [process for process in started if "chrom" in process.name()]
        opened.close()


@contextmanager
def still(processes: list[Any], *, when: bool) -> Iterator[None]:
    """Suspend processes and their descendants in the meantime, if `when`."""
    stopped = [process for each in processes for process in (each, *each.children(recursive=True))] if when else []
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in stopped:
            process.send_signal(signal.SIGCONT)
