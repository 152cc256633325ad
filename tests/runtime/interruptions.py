"""Runs that are interrupted: by Ctrl-C or a sudden end at a chosen event, or in a process of their own that a reward
holds."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.placement.launched import ROOT, environment
from tests.runtime.tiny_run import Watcher, saved_in
from tests.warm import WarmPopen


class Died(BaseException):
    """A process that ends without a word, as far as the run can tell."""


def act_at(moment, act):
    """An observer that acts at a moment, a name of `MOMENTS` or what such a name stands for, once."""
    event, matches, finished = MOMENTS[moment] if isinstance(moment, str) else moment
    acted, steps = [], [0]

    def on(seen, *facts):
        if seen == "started":
            steps.append(facts[0].resumed_at)
        if seen == event and not acted and steps[-1] >= finished and matches(*facts):
            acted.append(1)
            act()
        if seen == "step":
            steps.append(facts[0]["step"])

    return Watcher(on)


def press():
    os.kill(os.getpid(), signal.SIGINT)


def die():
    raise Died


def die_at(moment):
    return act_at(moment, die)


def during(stage, after=0, enough=lambda done, total: True):
    """While a stage runs that has done enough, once so many steps are finished."""
    return "progress", lambda seen, done, total, unit: seen == stage and enough(done, total), after


def of_step(step):
    return lambda record: record["step"] == step


MOMENTS = {  # event, which of them, steps before
    "while evaluating before": during("evaluate", 0, lambda done, total: 2 * done > total),
    "after the evaluation before": ("evaluated", of_step(0), 0),
    **{f"while generating step {n}": during("generate", n - 1, lambda done, total: done >= 2) for n in (1, 2)},
    **{f"while training step {n}": during("train", n - 1) for n in (1, 2)},
    **{f"after step {n}": ("step", of_step(n), 0) for n in range(1, 6)},
    **{f"after the evaluation at {n}": ("evaluated", of_step(n), 0) for n in (1, 2, 4)},
    "while the second set is evaluated at 2": during("evaluate", 2, lambda done, total: total == 3),
    "while saving step 2": during("checkpoint", 2),
}


def interrupt(go, folder, tree, moment, end="died", **how):
    """Begin a run, or resume it, that dies at a moment, or is stopped there by Ctrl-C, which leaves a checkpoint of its
    last step."""
    if end == "died":
        with pytest.raises(Died):
            go(folder, tree, observer=die_at(moment), **how)
        return
    summary = go(folder, tree, observer=act_at(moment, press), **how)
    saved = [checkpoint.step for checkpoint in saved_in(folder)]
    assert summary.status == "stopped" and max(saved, default=0) == summary.steps


def interrupt_and_resume(go, folder, tree, moment, end="died"):
    interrupt(go, folder, tree, moment, end)
    assert go(folder, tree, resume=True).status == "done"


FORKING = """
import json, os, signal, sys, threading
from pathlib import Path
from proxima.cli.main import main
from proxima.process import children as starting
from tests.runtime.tiny_run import Watcher, go
from tests.warm import forked_subprocess

starting.subprocess = forked_subprocess()
"""
TRAIN = FORKING + "sys.exit(main())"
KILLED = """
folder, tree, seconds, start = sys.argv[1:]

def on(event, *facts):
    if event == start and (event == "started" or facts[0]["step"] == 1):
        threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL)).start()

go(Path(folder), json.loads(tree), observer=Watcher(on))
"""


def forked(program: str, *words: str) -> subprocess.Popen:
    """A process that runs a program, and forks those that it needs."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return WarmPopen([sys.executable, "-c", program, *words], env=environment(), cwd=ROOT, **how)


def kill_after(seconds: float, folder: Path, tree: dict[str, Any], *, start: str = "started") -> None:
    """`go`, in a process that a thread of it kills so long after `started`, or after its first `step`: at any instant,
    whatever it is doing; it may have ended before."""
    killed = forked(FORKING + KILLED, str(folder), json.dumps(tree), str(seconds), start)
    _, err = killed.communicate(timeout=300)
    assert killed.returncode in (0, -signal.SIGKILL), err


def start(folder: Path, *more: str) -> subprocess.Popen:
    return forked(TRAIN, "train", str(folder.parent / "recipe.yaml"), f"folder={folder}", *more)


def start_and_hold(folder: Path, uid: int, *more: str) -> subprocess.Popen:
    """A run that stands still in the middle of a step, where the first completion of a prompt is scored."""
    hold, held = folder.parent / "hold", folder.parent / "hold.held"
    held.unlink(missing_ok=True)
    hold.write_text(str(uid))
    process = start(folder, *more)
    while not held.exists():
        if process.poll() is not None:
            pytest.fail(f"ended with {process.returncode}: {process.stderr.read()}")
        time.sleep(0.01)
    return process
