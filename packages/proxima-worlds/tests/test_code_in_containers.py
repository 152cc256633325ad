"""Code in containers of podman: one container runs many, and each sees nothing of those before it."""

import os
import shutil
import signal
import subprocess
from contextlib import closing
from threading import Timer

import pytest

from proxima.data import UserError
from proxima.environment.hosts import Hosts
from proxima.environment.interface import EnvironmentSpec
from proxima.process import code_runner
from proxima.process.code_runner import run_program
from proxima.process.sandbox import Sandbox
from proxima.reward.unit_tests import UnitTests
from proxima_worlds import contained
from proxima_worlds import containers as containers_of_engines
from proxima_worlds.contained import CodeContainers
from tests.containers import docker_log as docker_log
from tests.containers import left
from tests.containers import podman as podman
from tests.environment.worlds import called
from tests.processes import eventually
from tests.reward.make import ask, runner
from tests.sandboxes import beside_code

pytestmark = pytest.mark.slow
CONTAINER = Sandbox(kind="container")
TRACES = """
import os, socket, sys
sys.modules["proxima.process.limits"]._refuse = lambda *_: None
def folders():
    for root, names, _ in os.walk("/"):
        if root.startswith(("/proc", "/sys")):
            names.clear()
        elif os.access(root, os.W_OK):
            yield root
"""
LEAVE = """
for folder in folders():
    os.makedirs(folder + "/deep/er", mode=0)
    open(folder + "/trace", "w").close()
    os.symlink("/usr", folder + "/link")
os.chmod("/tmp", 0)
socket.socket(socket.AF_UNIX).bind("\\0trace")
print(os.getuid())
"""
FIND = """
found = [os.path.join(folder, name) for folder in folders() for name in os.listdir(folder)]
print(sorted(found), sum(map(str.isdecimal, os.listdir("/proc"))), os.getuid())
"""


@pytest.fixture
def containers(podman):
    with closing(CodeContainers(1, 512)) as made:
        code_runner.run_by_servers("container", made.address)
        yield made
    code_runner.run_by_servers("container", "")
    assert left() == []


def ran(code, seconds=60.0):
    return run_program(code, (5, 512), seconds, given="hi", errors=True, sandbox=CONTAINER)


@pytest.mark.parametrize("code", ["print(input())", "import os; os.abort()", "import sys; sys.exit(3)", "1 / 0"])
def test_a_program_prints_and_ends_as_without_a_container(containers, code):
    assert ran(code) == run_program(code, (5, 512), 60, given="hi", errors=True)


def test_a_code_finds_nothing_of_the_one_before(containers):
    container = left()
    code, printed = ran(TRACES + LEAVE)
    first = int(printed)
    code, printed = ran(TRACES + FIND)
    assert code == 0
    found = [f"/tmp/{name}" for name in beside_code("setup.py", "solution.py")]
    assert printed.startswith(f"{found} 3 ")
    assert int(printed.split()[-1]) != first and left() == container


def test_code_that_takes_too_long_is_killed_and_the_next_one_runs(containers):
    assert ran("print(1, flush=True)\nwhile True: pass", seconds=1.0) == (None, "1\n")
    assert ran("print(2)") == (0, "2\n")


def test_a_container_that_ends_is_replaced(containers):
    (first,) = left()
    subprocess.run(["podman", "kill", first], check=True, capture_output=True)
    assert ran("print(1)") == (0, "1\n") and left() != [first]


def test_the_tool_python_runs_in_a_container(podman):
    with closing(Hosts(EnvironmentSpec(kind="python", arguments={"sandbox": "container"}), workers=2)) as hosts:
        call = ("python", {"code": "import os; print(os.getcwd(), os.listdir('/root'), os.getpid() < 99)"})
        _, answers, _ = called(hosts, {"messages": [{"role": "user", "content": "?"}]}, call, call)
        eventually(lambda: len(left()) == 2)  # the second starts beside the work
    assert [answer.messages[0]["content"].split()[0] for answer in answers] == ["/tmp"] * 2
    assert left() == []


def test_a_worker_that_is_killed_leaves_its_container_to_the_next(podman):
    code = "```python\nimport time\ntime.sleep(600)\n```"
    with runner(UnitTests(seconds=600.0, sandbox="container"), workers=1) as made:
        made.check()
        (pool,) = made._pools.values()
        pool.start()
        eventually(lambda: pool.started == 1)
        worker = pool._queue.kept[0].worker
        Timer(1.0, os.kill, (worker.pid, signal.SIGKILL)).start()
        failed, right = ask(made, ["assert f() == 1"], code, "def f(): return 1")
        assert not failed.valid and right.value == 1
    assert left() == []


def test_a_container_that_does_not_start_is_one_line_before_the_run(podman, monkeypatch):
    monkeypatch.setattr(contained, "CODE_SERVER", "proxima.process.missing")
    with (
        pytest.raises(UserError, match=r"(?s)unit_tests.*sandbox='container' can't be used.*missing.*podman"),
        runner(UnitTests(sandbox="container")) as made,
    ):
        made.check()
    assert left() == []


def test_without_an_engine_it_is_refused(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with (
        pytest.raises(UserError, match="neither podman nor docker is installed.*install podman"),
        runner(UnitTests(sandbox="container")) as made,
    ):
        made.check()


def test_code_runs_in_a_container_of_docker(podman, docker_log, monkeypatch):
    monkeypatch.setattr(containers_of_engines, "ENGINES", ("docker",))
    with runner(UnitTests(sandbox="container"), workers=2) as made:
        assert [score.value for score in ask(made, ["assert f() == 1"], *["def f(): return 1"] * 3)] == [1] * 3
    assert left() == [] and {"image", "run", "ps"} <= {
        line.partition(" ")[0] for line in docker_log.read_text().splitlines()
    }


def test_docker_knows_every_option_of_code(tmp_path, monkeypatch):
    """The real client reads its command line before it looks for a daemon."""
    if (docker := shutil.which("docker")) is None:
        pytest.skip("docker is not installed")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    line = [docker, "run", *contained.container_options(root=True), "x"]
    said = subprocess.run(line, capture_output=True, text=True)
    assert "docker daemon" in said.stderr and "unknown" not in said.stderr and "invalid" not in said.stderr
