"""Runs whose agents play in containers are killed while eight of these run: no container is left, no prompt is lost or
consumed twice, and the resumed run equals one that was never interrupted."""

import os
import random
import signal
import time

import pytest

from benchmarks.kills.run import Killed
from tests.campaigns import campaign
from tests.containers import busybox_image as busybox_image
from tests.containers import left
from tests.processes import eventually
from tests.runtime.episode_world import STOPS, whole
from tests.runtime.test_async_run import assert_whole
from tests.runtime.tiny_run import NO_EVAL, assert_same, recipe

pytestmark = [pytest.mark.slow, pytest.mark.waits]
STEPS, AT_ONCE = 2, 8
AGENT = """
read -r row
messages=$(echo "$row" | sed 's/.*"messages": \\(\\[[^]]*\\]\\).*/\\1/')
said=$(wget -q -O - --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \\
  --post-data "{\\"messages\\": $messages}" $OPENAI_BASE_URL/chat/completions) || exit 7
sleep 15
echo "$said" | wc -c
"""
SIBLING = "packages/proxima-worlds/tests/test_boxed_agents.py::test_a_killed_run_leaves_no_container"


def recipe_of(image):
    agent = {"kind": "agent", "command": ["/bin/sh", "-c", AGENT], "workers": AT_ONCE}
    agent["container"] = {"image": image, "memory_mb": 64, "cpus": 0.5}
    own = {"task__environment": agent, "reward": [{"kind": "environment"}], "episode__seconds": 600.0}
    own |= {"sampling__stop": STOPS, "train__steps": STEPS, "train__prompts_per_step": 2, **NO_EVAL}
    return lambda model: recipe(model, **own)


@pytest.fixture(scope="module")
def runs(busybox_image, tmp_path_factory):
    """Plays runs in processes of their own; the first is not interrupted."""
    runs = Killed(tmp_path_factory.mktemp("runs"), recipe_of(busybox_image))
    runs.finish(runs.errors.parent / "unbroken")
    return runs


@pytest.mark.parametrize("seed", campaign(SIBLING, range(20)))
def test_a_run_is_killed_with_its_containers(runs, tmp_path, seed):
    folder, draws = tmp_path / "run", random.Random(seed)
    pid = runs.start(folder)
    eventually(lambda: seed % 2 == 0 or ((folder / "checkpoints").is_dir() and [*(folder / "checkpoints").iterdir()]))
    eventually(lambda: len(left(pid)) == AT_ONCE)
    time.sleep(draws.random() * 2)
    containers = len(left(pid))
    os.kill(pid, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    began = time.monotonic()
    eventually(lambda: not left(pid))
    print(f"killed with {containers} containers, which were gone after {time.monotonic() - began:.1f} s")
    pid = runs.start(folder)
    assert os.waitpid(pid, 0)[1] == 0, runs.errors.read_text()[-2500:]
    assert not left(pid)
    assert_whole(folder, steps=STEPS, prompts=2, lag=0)
    assert_same(whole(folder), whole(runs.errors.parent / "unbroken"))
