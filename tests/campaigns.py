"""Cases that `make test` leaves to `make test-all`, because a small test fails with the same fault."""

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest


def campaign(sibling: str, cases: Iterable[Any], minutes: float = 0) -> list[Any]:
    """Cases of a test, as campaigns; `sibling` is the id of a test, or that of a function of which a case is small.
    Those with `minutes` begin before the others."""
    mark = pytest.mark.campaign(sibling, minutes=minutes)
    return [pytest.param(*(case if type(case) is tuple else (case,)), marks=mark) for case in cases]


def dealt(items: list[Any], workers: int) -> list[Any]:
    """Let the part of the list that xdist gives to each worker begin with its share of the long campaigns, the longest
    first: one that begins when the others have ended takes minutes on one core."""
    long = sorted(filter(minutes, items), key=minutes, reverse=True)
    rest, order = [item for item in items if not minutes(item)], list[Any]()
    for worker in range(workers):
        own = long[worker::workers]
        room = max(0, (len(items) - len(order)) // (workers - worker) - len(own))
        order += own + rest[:room]
        rest = rest[room:]
    return order + rest


def minutes(item: Any) -> float:
    mark = item.get_closest_marker("campaign")
    length: float = mark.kwargs.get("minutes", 0) if mark else 0
    return length


def commit() -> str:
    """The hash of the checkout's commit; empty where git does not tell."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def turned(items: list[Any], commit: str) -> list[Any]:
    """Begin the list somewhere else for each commit, so that a run of limited time comes to all tests in turn."""
    start = int(commit[:8] or "0", 16) % max(1, len(items))
    return items[start:] + items[:start]
