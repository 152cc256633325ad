"""Simulate a user who clicks through runs for a long time, and read the memory of the servers and their processes."""

import os
import random
import shutil
import time
from importlib.util import find_spec
from typing import Any

MB, EVERY, PAUSE = 2**20, 60.0, 0.05  # seconds between two readings, and between two clicks
BROWSER_EVERY, RECOMPUTED = 60.0, 0.03  # seconds; the share of clicks whose columns come from weights
STEPS = (1, 2, 3)  # of the run with weights, each with another checkpoint
Served = tuple[int, str]  # a server's process, and its address
Paths = list[tuple[str, dict[str, Any]]]


def session(stored: Served, weights: Served, seconds: float, readings: list[dict[str, Any]]) -> None:
    """Append to `readings`, every minute or at least twenty times: seconds, requests, and each process's resident and
    proportional memory in MB. Clicks are random addresses of two runs, the first of which is large; some go to a server
    that computes columns from weights, and now and then a browser opens. Readings are printed at once, and kept if the
    session fails."""
    import psutil

    draw, requests = random.Random(0), 0
    servers = [psutil.Process(pid) for pid, _ in (stored, weights)]
    every = min(EVERY, seconds / 20)
    start = time.monotonic()
    read, browse = start, start + BROWSER_EVERY / 2
    with client(stored[1]) as large, client(weights[1]) as small:
        rows = large.get("api/0/step/1").raise_for_status().json()["completions"]
        few = small.get("api/0/step/1").raise_for_status().json()["completions"]
        while (now := time.monotonic()) < start + seconds:
            asked = (small, recomputing(draw, few)) if draw.random() < RECOMPUTED else (large, click(draw, rows))
            for path, parameters in asked[1]:
                asked[0].get(path, params=parameters).raise_for_status()
                requests += 1
            if now >= browse:
                browsed(stored[1], draw, rows)
                browse = time.monotonic() + BROWSER_EVERY
            if now >= read:
                readings.append({"seconds": round(now - start), "requests": requests, "mb": memory(servers)})
                print(readings[-1], flush=True)
                read = now + every
            time.sleep(min(PAUSE, seconds / 100))


def memory(servers: list[Any]) -> dict[str, list[int]]:
    """Return [resident, proportional] MB of each server and of its child process: a page that two processes share
    counts half for each in the second."""
    sizes = {}
    for process, name in zip(servers, ("server", "server with --recompute"), strict=True):
        (computing,) = process.children()
        for server, part in (
            (process, name),
            (computing, f"its process with {'weights' if 'rec' in name else 'torch'}"),
        ):
            of = server.memory_full_info()
            sizes[part] = [round(of.rss / MB), round(getattr(of, "pss", of.uss) / MB)]
    return sizes


def client(address: str) -> Any:
    """Return an HTTP client for a server, with its key."""
    import httpx

    root, _, query = address.partition("?")
    key = dict([part.split("=") for part in query.split("&") if part])
    return httpx.Client(base_url=root, params=key, timeout=600)


def click(draw: random.Random, rows: dict[str, list[Any]]) -> Paths:
    """Return the requests of one click of a reader."""
    uid, sample, turn, length = drawn(draw, rows)
    name, long = f"api/0/step/1/completion/{uid}.{sample}.{turn}", f"api/1/step/1/completion/0.{draw.randrange(8)}.0"
    token, answer = draw.randrange(length), draw.randrange(8)
    views: list[tuple[int, list[str]]] = [
        (10, [name, f"{name}/token/{token}", f"{name}/token/{token // 2}"]),
        (4, [long, f"{long}/token/{token}"]),
        (4, [f"api/0/step/1/group/{uid}"]),
        (2, ["api/0/step/1", "api/0/state"]),
        (1, ["api/runs", "api/0/trend", "api/0/timeline", "api/0/notes"]),
        (1, [f"{name}/compare?run=0&step=1", f"api/0/step/1/completion/0.{answer}.0/compare?run=1&step=1"]),
        (1, [f"api/0/step/1/search?q=add {sample}", "api/0/step/1/search?q=numbers.*think&regex=1"]),
    ]
    (paths,) = draw.choices([paths for _, paths in views], [weight for weight, _ in views])
    return requests_of(paths)


def recomputing(draw: random.Random, rows: dict[str, list[Any]]) -> Paths:
    """Return the requests of a click on a completion whose columns the server computes."""
    uid, sample, turn, length = drawn(draw, rows)
    name = f"api/0/step/{draw.choice(STEPS)}/completion/{uid}.{sample}.{turn}"
    return requests_of([name, f"{name}/token/{draw.randrange(length)}"])


def drawn(draw: random.Random, rows: dict[str, list[Any]]) -> list[int]:
    row = draw.randrange(len(rows["uid"]))
    return [rows[name][row] for name in ("uid", "sample", "turn", "length")]


def requests_of(paths: list[str]) -> Paths:
    return [
        (path.partition("?")[0], dict(p.split("=") for p in path.partition("?")[2].split("&") if p)) for path in paths
    ]


def browsed(address: str, draw: random.Random, rows: dict[str, list[Any]]) -> None:
    """Open some views in Chromium, if it is installed, and use the filters of the step's view."""
    if not (shutil.which("chromium") and find_spec("playwright")):
        return
    from playwright.sync_api import sync_playwright

    uid, sample, *_ = drawn(draw, rows)
    name = f"{uid}.{sample}.0"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"], env=kept)
        page = browser.new_page()
        page.set_default_timeout(600_000)
        step, group = "0/step/1", f"0/step/1/group/{uid}"
        for route in ("0", step, group, f"{step}/completion/{name}?t=7", f"0/compare?c=0.{sample}.0&step=1&run2=1"):
            page.goto(f"{address}#/{route}")
            page.wait_for_selector("#view > *")
            if route == step:
                for field, text in (("length, at least", "2"), ("Text of the answers", f"add {sample}")):
                    page.fill(f'[aria-label="{field}"]', text)
            page.wait_for_timeout(500)
        browser.close()
