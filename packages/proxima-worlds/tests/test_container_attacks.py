"""The attacks on the sandbox, by an agent in a container of podman: none gets out."""

import asyncio
import os
import secrets
import sys
from contextlib import closing, suppress
from pathlib import Path

import pytest

import proxima
from proxima.environment.agent_kinds import AgentSpec
from proxima.environment.agents import AgentJob, read_to_end
from proxima.process.sandbox import interpreter_paths, outermost
from proxima_worlds.boxed_agents import ContainerBox
from tests.campaigns import campaign
from tests.containers import busybox_image as busybox_image
from tests.containers import left
from tests.process.attacks import ATTACKS, Scene
from tests.processes import eventually

pytestmark = [pytest.mark.slow, pytest.mark.waits]
SECONDS = 8.0
LIBRARIES = ("/usr", "/lib64", "/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu")
SMALL = {"tcp_to_the_endpoint", "unix_abstract", "memory_of_others", "outlive_by_session"}
HERE = "packages/proxima-worlds/tests/test_container_attacks.py::test_an_agent_does_not_get_out"
# A container has a /tmp of its own, in which it may write: also where a checkout below /tmp would be shown to it.
BELOW_TMP = ("packages",) if Path(proxima.__file__).is_relative_to("/tmp") else ()
LEFT_OUT = ("become_root", *BELOW_TMP)  # the first is the image's user
PROGRAMS = [attack for attack in ATTACKS if not attack.limited and attack.name not in LEFT_OUT]
CASES = [attack for attack in PROGRAMS if attack.name in SMALL]
CASES = [*CASES, *campaign(HERE, [attack for attack in PROGRAMS if attack.name not in SMALL])]


@pytest.fixture(scope="module")
def scene():
    with closing(Scene()) as made:
        yield made


@pytest.fixture(scope="module")
def runner(busybox_image):
    """Containers that show this machine's Python."""
    shown = [path for path in (*LIBRARIES, *interpreter_paths()) if not path.endswith(".zip")]
    mounts = [path for path in outermost(shown) if path.startswith("/")]
    shown = tuple(path for path in mounts if os.path.exists(path))
    container = ContainerBox(image=busybox_image, memory_mb=256, pids=32, mounts=shown)
    with closing(container.runner(AgentSpec(command=("true",), sandbox=container))) as made:
        yield made


@pytest.mark.parametrize("attack", CASES, ids=lambda attack: attack.name)
def test_an_agent_does_not_get_out(scene, runner, attack):
    mark, printed = secrets.token_hex(8), b""
    runner.command = (sys.executable, "-I", "-c", scene.program(attack), mark)

    async def play():
        nonlocal printed
        job = AgentJob(row={}, base_url="http://127.0.0.1:9/v1", api_key="k")
        async with runner.running(job) as process:
            out, errors, _ = await read_to_end(process, b"{}")
            printed = out + errors

    with suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(play(), SECONDS))
    text = printed.decode(errors="replace")
    assert scene.escapes(text, mark) == [], text[-2000:]
    assert "can't be started" not in text and "SyntaxError" not in text and "No module" not in text, text[-2000:]
    eventually(lambda: not left())
