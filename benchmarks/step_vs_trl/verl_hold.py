"""Hold verl's trainer after every step until the next one is requested; each of verl's processes imports this module.

verl times its own steps (`timing_s/step`: generation, rewards, updates, weights in the server), logs them, and
continues. Waiting in the log call is outside that time. Standard library and verl only.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from verl.utils.tracking import Tracking

FOLDER = Path(os.environ["HELD_VERL_FOLDER"])
_log = Tracking.log


def held(self: Any, data: dict[str, Any], step: int, *rest: Any, **more: Any) -> None:
    """Log, publish the step's numbers as `step-N.json`, and wait for the file `go-N`."""
    _log(self, data, step, *rest, **more)
    written = FOLDER / f"step-{step}.partial"
    written.write_text(
        json.dumps({name: float(value) for name, value in data.items() if _is_number(value)}), encoding="utf-8"
    )
    written.rename(FOLDER / f"step-{step}.json")
    while not (FOLDER / f"go-{step}").exists():
        time.sleep(0.002)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


Tracking.log = held
