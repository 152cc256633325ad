"""Somebody clicks through a run for a long time, and the memory of the server and its process is read meanwhile."""

import random
import shutil
import time
from importlib.util import find_spec
from typing import Any

MB, EVERY, PAUSE = 2**20, 10.0, 0.05  # seconds between two readings, and between two clicks
BROWSER_EVERY = 60.0


def session(pid: int, address: str, seconds: float) -> tuple[dict[str, list[int]], int]:
    """Resident memory of the server and of its processes in MB, every ten seconds or twenty times, and the number of
    clicks: every address of two runs, of which the first is large, at random, and now and then a browser."""
    import httpx
    import psutil

    draw, process, clicks = random.Random(0), psutil.Process(pid), 0
    memory: dict[str, list[int]] = {"server": [], "its process with torch": []}
    root, _, query = address.partition("?")
    key = dict([part.split("=") for part in query.split("&") if part])
    start = time.monotonic()
    read, browse = start, start + BROWSER_EVERY / 2
    with httpx.Client(base_url=root, params=key, timeout=600) as client:
        step = client.get("api/0/step/1").raise_for_status().json()
        while (now := time.monotonic()) < start + seconds:
            for path, parameters in click(draw, step["completions"]):
                client.get(path, params=parameters).raise_for_status()
                clicks += 1
            if now >= browse:
                browsed(address, draw, step["completions"])
                browse = time.monotonic() + BROWSER_EVERY
            if now >= read:
                memory["server"].append(round(process.memory_info().rss / MB))
                computing = (one.memory_info().rss for one in process.children(recursive=True))
                memory["its process with torch"].append(round(sum(computing) / MB))
                read = now + min(EVERY, seconds / 20)
            time.sleep(min(PAUSE, seconds / 100))
    return memory, clicks


def click(draw: random.Random, rows: dict[str, list[Any]]) -> list[tuple[str, dict[str, Any]]]:
    """The requests of one click of a reader."""
    row = draw.randrange(len(rows["uid"]))
    uid, sample, turn = (rows[name][row] for name in ("uid", "sample", "turn"))
    name, long = f"api/0/step/1/completion/{uid}.{sample}.{turn}", f"api/1/step/1/completion/0.{draw.randrange(8)}.0"
    token = draw.randrange(rows["length"][row])
    views: list[tuple[int, list[str]]] = [
        (10, [name, f"{name}/token/{token}", f"{name}/token/{token // 2}"]),
        (4, [long, f"{long}/token/{token}"]),
        (4, [f"api/0/step/1/group/{uid}"]),
        (2, ["api/0/step/1", "api/0/state"]),
        (1, ["api/runs", "api/0/trend", "api/0/timeline", "api/0/notes"]),
        (1, [f"{name}/compare?run=0&step=1"]),
        (1, [f"api/0/step/1/search?q=add {sample}", "api/0/step/1/search?q=numbers.*think&regex=1"]),
    ]
    (paths,) = draw.choices([paths for _, paths in views], [weight for weight, _ in views])
    return [
        (path.partition("?")[0], dict(p.split("=") for p in path.partition("?")[2].split("&") if p)) for path in paths
    ]


def browsed(address: str, draw: random.Random, rows: dict[str, list[Any]]) -> None:
    """Some views in a Chromium, where there is one."""
    if not (shutil.which("chromium") and find_spec("playwright")):
        return
    import os

    from playwright.sync_api import sync_playwright

    row = draw.randrange(len(rows["uid"]))
    uid, sample = rows["uid"][row], rows["sample"][row]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"], env=kept)
        page = browser.new_page()
        page.set_default_timeout(600_000)
        for route in ("0", "0/step/1", f"0/step/1/group/{uid}", f"0/step/1/completion/{uid}.{sample}.0?t=7"):
            page.goto(f"{address}#/{route}")
            page.wait_for_selector("#view > *")
            page.wait_for_timeout(500)
        browser.close()
