"""Waiting for what processes do."""

import time
from pathlib import Path
from typing import Any

LONG = 240.0  # seconds in which something must happen


def until(condition: Any, log: Path, seconds: float = LONG) -> Any:
    """What the condition gives, once that is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-6000:]
        time.sleep(0.05)
    return value
