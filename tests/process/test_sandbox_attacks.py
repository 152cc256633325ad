"""Attacks on the sandbox, from code as rewards run it and from programs that may start others: none gets out."""

import os
import re
import secrets
import subprocess
import sys
import tempfile
from contextlib import closing, suppress
from pathlib import Path

import pytest

from proxima.process import code_runner
from proxima.process.code_runner import run_program
from proxima.process.sandbox import USERS, Sandbox
from proxima.reward.unit_tests import UnitTests
from proxima_worlds.contained import CodeContainers
from tests.campaigns import campaign
from tests.containers import left
from tests.containers import podman as podman
from tests.process.attacks import ATTACKS, Scene, left_processes
from tests.processes import eventually, family
from tests.reward.make import ask, runner
from tests.sandboxes import needs_bubblewrap

pytestmark = [pytest.mark.slow]
SECONDS, MEMORY_MB = 4.0, 256
OUTPUT_BYTES = 17 << 20
BUBBLEWRAP, CONTAINER = Sandbox(kind="bubblewrap"), Sandbox(kind="container")
HERE = "tests/process/test_sandbox_attacks.py"
SMALL = {"memory_of_others", "tcp_to_the_endpoint", "unix_abstract", "key_of_the_server", "signal_to_the_victim"}
SMALL |= {"fork_and_count", "outlive_by_session", "new_user_namespace", "shared_memory", "fill_the_disk"}


def cases(sibling, attacks):
    """A few attacks, and the others as campaigns."""
    small, large = ([attack for attack in attacks if (attack.name in SMALL) == few] for few in (True, False))
    return [*small, *campaign(f"{HERE}::{sibling}", large)]


CODE = cases("test_code_does_not_get_out", ATTACKS)
SHOWN = [attack for attack in ATTACKS if attack.shown and (os.geteuid() == 0 or not attack.root)]
SHOWN = cases("test_without_the_sandbox_it_does", SHOWN)
CONTAINED = cases("test_code_does_not_get_out_of_a_container", ATTACKS)
PROGRAMS = [attack for attack in ATTACKS if not attack.limited]
PROGRAMS = cases("test_a_program_that_may_start_others_does_not_get_out", PROGRAMS)


@pytest.fixture(scope="module")
def scene():
    with closing(Scene()) as made:
        yield made


def attacked(scene, attack, sandbox):
    # Marks the processes, since it is among their arguments: no test beside this one has it. The clock ends the code
    # long before it has used so much of a core.
    cpu_seconds = 1_000_000 + secrets.randbelow(1_000_000_000)
    limits = (cpu_seconds, MEMORY_MB + 1000)
    _, printed = run_program(scene.program(attack), limits, SECONDS, errors=True, sandbox=sandbox)
    assert len(printed) < OUTPUT_BYTES
    return printed, scene.escapes(printed, "proxima.process.code_process", str(cpu_seconds))


def assert_none(printed, escapes):
    assert escapes == [], printed[-2000:]
    assert "PLACE" not in printed.replace("PLACE[", "") and "NameError" not in printed and "SyntaxError" not in printed


@needs_bubblewrap
@pytest.mark.parametrize("attack", CODE, ids=lambda attack: attack.name)
def test_code_does_not_get_out(scene, attack):
    assert_none(*attacked(scene, attack, BUBBLEWRAP))


@pytest.fixture(scope="module")
def containers(podman):
    with closing(CodeContainers(1, MEMORY_MB + 1000)) as made:
        code_runner.run_by_servers("container", made.address)
        yield made
    code_runner.run_by_servers("container", "")


def forks_of_servers(pid=None):
    """The processes of code in the containers that a process has started; None: this one. Other tests run beside it."""
    forks = []
    for name in left(pid):
        asked = ["podman", "inspect", "--format", "{{.State.Pid}}", name]
        first = subprocess.run(asked, capture_output=True, text=True).stdout.strip()  # none of one that has just ended
        for each in family(int(first)) if first.isdecimal() and int(first) else []:
            with suppress(OSError):
                user = re.search(r"^Uid:\s+(\d+)", Path(f"/proc/{each}/status").read_text(), re.MULTILINE)[1]
                forks += [each] * (int(user) in USERS)
    return forks


@pytest.mark.parametrize("attack", CONTAINED, ids=lambda attack: attack.name)
def test_code_does_not_get_out_of_a_container(scene, containers, attack):
    printed, escapes = attacked(scene, attack, CONTAINER)
    assert_none(printed, escapes + [f"left: {forks}" for forks in [forks_of_servers()] if forks])
    assert run_program("print(1)", (4, 512), 60, sandbox=CONTAINER) == (0, "1\n")


@pytest.mark.parametrize("attack", SHOWN, ids=lambda attack: attack.name)
def test_without_the_sandbox_it_does(scene, attack):
    printed, escapes = attacked(scene, attack, Sandbox())
    assert escapes, printed[-2000:]


@needs_bubblewrap
@pytest.mark.parametrize("attack", PROGRAMS, ids=lambda attack: attack.name)
def test_a_program_that_may_start_others_does_not_get_out(scene, attack):
    mark = secrets.token_hex(8)
    program = [sys.executable, "-I", "-c", scene.program(attack), mark]
    with Sandbox(kind="bubblewrap", processes=64).command(program) as (line, fds):
        process = subprocess.Popen(line, env={}, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT)  # fmt: skip
    try:
        printed = process.communicate(timeout=SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        printed = process.communicate()[0]
    assert scene.escapes(printed.decode(errors="replace"), mark) == [], printed[-2000:].decode(errors="replace")


RUN = """
import asyncio, sys
from proxima.reward.unit_tests import UnitTests
from tests.processes import eventually, family
from tests.reward.make import ask, runner
code = "import time\\nprint(1)\\ntime.sleep(600)"
with runner(UnitTests(seconds=600.0, memory_mb=int(sys.argv[1]), sandbox=sys.argv[2]), workers=3) as made:
    ask(made, ["assert f() == 1"], *[f"```python\\n{code}\\n```"] * 3)
"""


@needs_bubblewrap
def test_nothing_is_left_of_a_run_that_is_killed():
    memory_mb = str(10_000 + secrets.randbelow(90_000))  # among the arguments, and of no other test
    run = subprocess.Popen([sys.executable, "-c", RUN, memory_mb, "bubblewrap"])
    words = ("proxima.process.code_process", memory_mb)
    eventually(lambda: len(left_processes(words, 0)) >= 6)  # three that run and three that wait, in their sandboxes
    run.kill()
    run.wait()
    eventually(lambda: not left_processes(words, 0))


def test_no_container_is_left_of_a_run_that_is_killed(podman):
    run = subprocess.Popen([sys.executable, "-c", RUN, str(MEMORY_MB), "container"])
    eventually(lambda: len(forks_of_servers(run.pid)) >= 3)
    folders = list(Path(tempfile.gettempdir()).glob(f"proxima-*-{run.pid}-*"))
    assert len(left(run.pid)) == 3 and folders
    run.kill()
    run.wait()
    eventually(lambda: not left(run.pid))
    eventually(lambda: not any(folder.exists() for folder in folders))


@needs_bubblewrap
@pytest.mark.campaign(f"{HERE}::test_code_does_not_get_out")
def test_a_reward_scores_every_attack_with_0(scene):
    codes = [f"```python\n{scene.program(attack)}\n```" for attack in ATTACKS]
    memory_mb = MEMORY_MB + 1 + 2 * secrets.randbelow(500)  # odd: of no other test
    with runner(UnitTests(seconds=SECONDS, memory_mb=memory_mb, sandbox="bubblewrap"), workers=4) as made:
        scores = ask(made, ["assert add(1, 2) == 3"], *codes)
        for attack, score in zip(ATTACKS, scores, strict=True):
            assert (score.valid, score.value, score.error) == (True, 0, None), (attack.name, score)
    assert scene.escapes("", "proxima.process.code_process", str(memory_mb)) == []


@pytest.mark.campaign(f"{HERE}::test_code_does_not_get_out_of_a_container")
def test_a_reward_scores_every_attack_in_a_container_with_0(scene, podman):
    codes = [f"```python\n{scene.program(attack)}\n```" for attack in ATTACKS]
    before = left()  # the container of the tests of this module, if one has run here
    with runner(UnitTests(seconds=SECONDS, memory_mb=MEMORY_MB, sandbox="container"), workers=4) as made:
        scores = ask(made, ["assert add(1, 2) == 3"], *codes)
        for attack, score in zip(ATTACKS, scores, strict=True):
            assert (score.valid, score.value, score.error) == (True, 0, None), (attack.name, score)
        assert forks_of_servers() == []
    assert scene.escapes("") == [] and left() == before
