"""Runs that are interrupted: by Ctrl-C or a sudden end at a chosen event, or in a process of their own that a reward
holds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.tiny_run import Watcher
from tests.warm import WarmPopen

STEPS = 4


class Died(BaseException):
    """A process that ends without a word, as far as the run can tell."""


def stop_at(event, matches):
    """An observer that presses Ctrl-C at the first event that matches, once."""
    pressed = []

    def press(seen, *facts):
        if seen == event and not pressed and matches(*facts):
            pressed.append(1)
            os.kill(os.getpid(), signal.SIGINT)

    return Watcher(press)


def die_at(event, matches):
    died = []

    def die(seen, *facts):
        if seen == event and not died and matches(*facts):
            died.append(1)
            raise Died

    return Watcher(die)


PLACES = {
    "at the end of generating": ("progress", lambda stage, done, total, unit: stage == "generate" and done == 2),
    "while training": ("progress", lambda stage, done, total, unit: stage == "train"),
    "after step 1": ("step", lambda record, sample: record["step"] == 1),
    "after step 3": ("step", lambda record, sample: record["step"] == 3),
    "while evaluating before": ("progress", lambda stage, done, total, unit: stage == "evaluate" and done == 3),
    "after the evaluation at 2": ("evaluated", lambda record: record["step"] == 2),
    "after the last step": ("step", lambda record, sample: record["step"] == STEPS),
}


ROOT = Path(__file__).resolve().parents[2]
TRAIN = """
import sys
from proxima.cli.main import main
from proxima.engine import supervisor
from tests.warm import forked_subprocess

supervisor.subprocess = forked_subprocess()
sys.exit(main())
"""


def start(folder: Path, *more: str) -> subprocess.Popen:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = ["-c", TRAIN, "train", str(folder.parent / "recipe.yaml"), f"folder={folder}", *more]
    return WarmPopen(
        [sys.executable, *command],
        env=environment,
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_and_hold(folder: Path, uid: int, *more: str) -> subprocess.Popen:
    """A run that stands still in the middle of a step, where the first completion of a prompt is scored."""
    hold, held = folder.parent / "hold", folder.parent / "hold.held"
    held.unlink(missing_ok=True)
    hold.write_text(str(uid))
    process = start(folder, *more)
    while not held.exists():
        if process.poll() is not None:
            pytest.fail(f"ended with {process.returncode}: {process.stderr.read()}")
        time.sleep(0.05)
    return process
