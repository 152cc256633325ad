"""Runs whose wall clock jumps by hours in both directions, and once to before 1970, while they train, are killed, stand
still and resume: nothing ends by it, nothing is lost, and they equal one whose clock was left alone."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.campaigns import campaign
from tests.moved_clock import MovedClock
from tests.runtime.tiny_run import assert_same, recipe, traces
from tests.tiny import tiny_factory

pytestmark = pytest.mark.waits
SIBLING = "tests/test_house.py::test_no_wait_and_no_age_is_measured_by_a_clock_that_can_be_set"
HOURS = (-24 * 365 * 70, -10, -1, 0, 1, 10)
KILLS, STILL = 3, 4.0  # seconds for which it stands still, while the clock that only goes forward goes on
PROGRAM = """
import json, sys
from pathlib import Path
import torch
from tests.runtime.tiny_run import Watcher, go

torch.set_num_threads(1)
folder, watcher = Path(sys.argv[1]), Watcher()
resume = (folder / "run.sqlite").exists()
summary = go(folder, json.loads(sys.argv[2]), resume=resume, observer=watcher)
assert summary.status == "done" and not watcher.warnings, (summary, watcher.warnings)
"""


def start(folder: Path, tree: object, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(tree)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> None:
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]


@contextmanager
def jumping(clock: MovedClock, draws: random.Random) -> Iterator[None]:
    over = threading.Event()

    def jump() -> None:
        while not over.wait(draws.uniform(0.02, 0.3)):
            clock.move(draws.choice([*HOURS, draws.uniform(-10, 10)]))

    thread = threading.Thread(target=jump)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def set_back_and_forth(folder: Path, draws: random.Random) -> None:
    """Files have the times of a clock that jumped."""
    for place in folder.rglob("*"):
        if draws.random() < 0.3:
            moment = time.time() + 3600 * draws.uniform(-10, 10)
            os.utime(place, (moment, moment))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, Path, float]:
    """The recipe, a run of it that nothing disturbs, and its seconds."""
    root = tmp_path_factory.mktemp("plain")
    (root / "model").mkdir()
    tree, began = recipe(tiny_factory(root / "model")("llama"), train__steps=6), time.monotonic()
    ended(start(root / "run", tree, dict(os.environ)))
    return tree, root / "run", time.monotonic() - began


@pytest.mark.parametrize("seed", campaign(SIBLING, range(4), minutes=1))
def test_a_run_whose_clock_jumps_equals_one_whose_clock_does_not(seed, plain, tmp_path):
    (tree, unbroken, seconds), draws, clock = plain, random.Random(seed), MovedClock(tmp_path)
    folder = tmp_path / "run"
    with jumping(clock, random.Random(seed)):
        for _ in range(KILLS):
            process = start(folder, tree, clock.environment())
            time.sleep(seconds * draws.uniform(0.4, 0.8))
            process.send_signal(signal.SIGSTOP)
            time.sleep(STILL * draws.random())
            process.send_signal(signal.SIGCONT)
            time.sleep(seconds * draws.uniform(0, 0.3))
            process.kill()
            process.communicate()
            set_back_and_forth(folder, draws)
        ended(start(folder, tree, clock.environment()))
    assert_same(traces(folder), traces(unbroken))
