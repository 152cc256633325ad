"""Runs that train on Harbor tasks are killed at random moments: while containers start, agents act or tests judge. No
container, volume or folder is left, no prompt is lost or consumed twice, no reward is another one, and the resumed run
equals one that was never interrupted."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from benchmarks.kills.run import Killed
from tests.campaigns import campaign
from tests.containers import busybox_image as busybox_image
from tests.containers import left
from tests.harbor_tasks import ANSWER, write_tasks
from tests.processes import eventually
from tests.runtime.episode_world import episode_recipe, whole
from tests.runtime.test_async_run import assert_whole
from tests.runtime.tiny_run import NO_EVAL, assert_same

pytestmark = [pytest.mark.slow, pytest.mark.waits]
STEPS = 2
SIBLING = "packages/proxima-worlds/tests/test_harbor.py::test_a_killed_run_leaves_no_container_of_a_task"


def recipe_of(tasks: Path):
    own = {"kind": "harbor", "path": str(tasks)}

    def recipe(model: Path):
        longer = Path(shutil.copytree(model, model.with_name("longer")))
        config = json.loads((longer / "config.json").read_text())
        (longer / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
        rewards = [{"kind": "environment"}, {"kind": "tests.runtime.tiny_run:Even"}]
        settings = {"train__steps": STEPS, "train__prompts_per_step": 2, "episode__seconds": 600.0, **NO_EVAL}
        return episode_recipe(longer, task=own, reward=rewards, **settings) | {"task": own}

    return recipe


@pytest.fixture(scope="module")
def runs(busybox_image, tmp_path_factory):
    """Plays runs in processes of their own; the first is not interrupted. `seconds` it took."""
    root = tmp_path_factory.mktemp("runs")
    slow = ANSWER["tests/test.sh"].replace("#!/bin/sh\n", "#!/bin/sh\nsleep 1\n")
    runs = Killed(root, recipe_of(write_tasks(root / "tasks", **{"tests/test.sh": slow})))
    began = time.monotonic()
    runs.finish(root / "unbroken")
    return runs, time.monotonic() - began


@pytest.mark.parametrize("seed", campaign(SIBLING, range(8), minutes=1))
def test_a_run_is_killed_with_the_containers_of_its_tasks(runs, tmp_path, seed):
    killed, seconds = runs
    folder = tmp_path / "run"
    draws = random.Random(seed)
    for _ in range(2):
        pid = killed.start(folder)
        time.sleep(seconds * draws.random())
        os.kill(pid, signal.SIGKILL)
        containers = len(left(pid))
        os.waitpid(pid, 0)
        began = time.monotonic()
        eventually(lambda pid=pid: not left(pid) and not [*Path("/tmp").glob(f"proxima-*-{pid}-*")])
        print(f"killed with {containers} containers and volumes, gone after {time.monotonic() - began:.1f} s")
    pid = killed.start(folder)
    assert os.waitpid(pid, 0)[1] == 0, killed.errors.read_text()[-2500:]
    assert not left(pid)
    assert_whole(folder, steps=STEPS, prompts=2, lag=0)
    assert_same(whole(folder), whole(killed.errors.parent / "unbroken"))
