"""Agents in containers of podman and in sandboxes of bubblewrap, against the endpoint of a run."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from proxima.data import FieldError
from proxima.environment.agent_kinds import AgentSpec, as_in_recipe, make_agent
from proxima.environment.agents import AgentJob, CommandAgents, ProgramGroups, start_program
from proxima.environment.hosts import EnvironmentFailure
from proxima.process.children import ENDS_WITH_US
from proxima.process.sandbox import bubblewrap_problem
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.rollout.episodes.worlds import Play, make_worlds
from proxima_worlds import boxed_agents, container_guardian, containers
from proxima_worlds.boxed_agents import ended
from proxima_worlds.containers import RELAY, Container, ensure_image
from tests.containers import busybox_image as busybox_image
from tests.containers import docker_log as docker_log
from tests.containers import left
from tests.processes import eventually, with_word
from tests.rollout.episodes.test_agent_player import Scripted, play

pytestmark = [pytest.mark.slow, pytest.mark.waits]
ASKS = """
read row
said=$(wget -q -O - --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \\
  --post-data '{"messages": [{"role": "user", "content": "begin"}]}' $OPENAI_BASE_URL/chat/completions)
case "$said" in *"it is 4"*) echo 0.5;; *) echo "$said" >&2; exit 3;; esac
"""
LONG = {"row": {"question": "x"}, "base_url": "http://127.0.0.1:9/v1", "api_key": "secret"}


def shell(image, code, **fields):
    return AgentSpec(
        command=("/bin/sh", "-c", code), sandbox={"kind": "container", "image": image, "memory_mb": 64, **fields}
    )


def play_one(agents, seconds=60):
    async def run():
        return await asyncio.wait_for(agents.play(AgentJob(**LONG)), seconds)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def agents(busybox_image):
    """Plays the code of a shell in a container."""
    spec = shell(busybox_image, "true", pids=16)
    shared = spec.sandbox.runner(spec)

    def run(code, seconds=60):
        shared.command = ("/bin/sh", "-c", code)
        return play_one(CommandAgents(shared, 1), seconds)

    yield run
    shared.close()


def test_an_agent_in_a_container_is_answered(busybox_image):
    policy = Scripted(lambda context, request: "it is 4")
    completions = play(policy, shell(busybox_image, ASKS), samples=2)
    assert [c.episode.reward for c in completions] == [0.5, 0.5] and not any(c.episode.failure for c in completions)
    assert left() == []


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("echo one >&2; echo two >&2; exit 3", "the agent ended with exit code 3 of its container: one | two"),
        ("kill -9 $$", "the agent ended with SIGKILL"),
        ("head -c 300m /dev/zero | tail -c 290m", "out of memory"),
        ("exec /bin/none", "exit code 127 of its container"),
    ],
)
def test_how_a_container_ended_is_named(agents, code, failure):
    with pytest.raises(EnvironmentFailure) as error:
        agents(code)
    assert failure in str(error.value)


@pytest.mark.parametrize(
    "code",
    [
        "touch /x || echo 1",  # the image can't be changed
        "echo x > /tmp/x && cat /tmp/x && echo 1",
        "test $(grep -c : /proc/net/dev) = 1 && echo 1",  # the loopback interface
        "kill -9 1; kill -19 1; echo 1",  # the first process is out of reach
        "cat /proc/1/environ || echo 1",
        "test $(cat /proc/self/oom_score_adj) = 1000 && echo 1",
        "grep -q 'CapBnd:.*0000000000000000' /proc/self/status && grep -q 'NoNewPrivs:.*1' /proc/self/status && echo 1",
        "ls /proc | grep -c '^[0-9]' > /tmp/n; test $(cat /tmp/n) -lt 9 && echo 1",
    ],
)
def test_what_an_agent_sees(agents, code):
    assert agents(f"{code}\nsleep 0.2") == 1  # podman may lose what a container says as it ends


def test_an_agent_that_takes_too_long_is_gone_afterwards(agents):
    with pytest.raises(TimeoutError):
        agents("sleep 1000", seconds=3)
    assert left() == []


def test_a_fork_bomb_ends_with_its_container(agents):
    with pytest.raises(EnvironmentFailure, match="can't fork"):
        agents("b() { b | b & }; b; sleep 1; exit 4")
    assert left() == []


PARENT = """
import asyncio, sys
from proxima.environment.agent_kinds import AgentSpec
from proxima.environment.agents import AgentJob, CommandAgents, start_program
from proxima_worlds.boxed_agents import ended
async def main():
    box = {"kind": "container", "image": sys.argv[1], "memory_mb": 32}
    agents = AgentSpec(command=("/bin/sleep", "1000"), sandbox=box).build()
    job = AgentJob(row={}, base_url="http://127.0.0.1:9/v1", api_key="k")
    tasks = [asyncio.create_task(agents.play(job)) for _ in range(4)]
    print("started", flush=True)
    await asyncio.gather(*tasks)
asyncio.run(main())
"""


def test_a_second_ctrl_c_leaves_no_command_of_the_engine():
    async def run():
        process = await start_program(["sleep", "1000"], os.environ, start_new_session=True)
        waiting = asyncio.create_task(ended(process))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return process.returncode

    assert asyncio.run(run()) == -signal.SIGKILL


@pytest.mark.parametrize(("command", "code"), [("head -c 400000 /dev/zero", 0), ("exec yes", -signal.SIGKILL)])
def test_what_nobody_reads_keeps_no_command_of_the_engine(command, code, monkeypatch):
    """One that ends by itself is not killed."""
    monkeypatch.setattr(boxed_agents, "END_SECONDS", 60.0 if code == 0 else 0.2)

    async def run():
        process = await start_program(["sh", "-c", command], os.environ, start_new_session=True)
        await asyncio.sleep(0.3)  # until asyncio reads no more, either
        async with asyncio.timeout(100):
            await ended(process)
        return process.returncode

    assert asyncio.run(run()) == code


def test_what_a_killed_program_leaves_behind_holds_up_nobody():
    """It has the program's output, in a session of its own."""
    word = f"{600 + os.getpid() / 1e7:.7f}"

    async def run():
        process = await start_program(["sh", "-c", f"setsid sleep {word} & exec yes"], os.environ, **ENDS_WITH_US)
        async with asyncio.timeout(100):
            async with ProgramGroups().killed_at_end(process):
                await asyncio.sleep(0.3)
        return process.returncode

    try:
        assert asyncio.run(run()) == -signal.SIGKILL
    finally:
        for pid in with_word("cmdline", word):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_exit_code_is_that_of_the_program(code, monkeypatch):
    """asyncio waits for a process in a thread of its own, which may be late."""
    waitpid = os.waitpid

    def late(pid, options):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # ended, and nobody has asked for its code
        time.sleep(0.2)
        return waitpid(pid, options)

    monkeypatch.setattr(os, "waitpid", late)

    async def run():
        process = await start_program(["sh", "-c", f"exit {code}"], os.environ, **ENDS_WITH_US)
        async with asyncio.timeout(100), ProgramGroups().killed_at_end(process):
            await process.stdout.read()
        return process.returncode

    assert asyncio.run(run()) == code


@pytest.mark.parametrize("moment", ["while they start", "while they run"])
def test_a_killed_run_leaves_no_container(busybox_image, moment):
    with subprocess.Popen([sys.executable, "-c", PARENT, busybox_image], stdout=subprocess.PIPE) as run:
        assert run.stdout.readline() == b"started\n"
        if moment == "while they run":
            eventually(lambda: len(left(run.pid)) == 4)
        run.kill()
    eventually(lambda: not left(run.pid) and not [*Path("/tmp").glob(f"proxima-*-{run.pid}-*")])


def test_a_killed_run_whose_guardian_is_killed_is_cleaned_by_the_next(busybox_image):
    name = f"proxima-{socket.gethostname()}-999999-1-abcd-0"
    line = ["podman", "create", f"--name={name}", "--label=proxima.run=x", busybox_image, "/bin/true"]
    subprocess.run(line, check=True, capture_output=True)
    assert left(999999)
    shell(busybox_image, "true").build().close()
    assert left(999999) == []


FORGETFUL = """#!/bin/sh
echo "$1" >> {log}
case $1 in
  ps) test "$(grep -c ps {log})" -gt 4 || exit 125
      grep -q rm {log} || echo proxima-here-1-1-abcd-0 ;;
esac
"""


def test_a_list_that_fails_is_not_an_empty_one(tmp_path):
    """podman's fails while a container that it looks up is removed by another command."""
    log, engine = tmp_path / "log", tmp_path / "engine"
    log.touch()
    engine.write_text(FORGETFUL.format(log=log))
    engine.chmod(0o755)
    container_guardian.clean(str(engine), "proxima-here-1-1-abcd", str(tmp_path / "folder"))
    asked = log.read_text().split()
    assert asked.count("rm") == 1
    assert asked[-2 * container_guardian.QUIET :] == ["ps", "volume"] * container_guardian.QUIET


def test_a_stopped_engine_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(container_guardian, "BEAT", 0)
    folder = tmp_path / "folder"
    folder.mkdir()
    container_guardian.clean("/bin/false", "proxima-here-1-1-abcd", str(folder))
    assert not folder.exists()


def test_an_image_that_nobody_has(busybox_image):
    with pytest.raises(FieldError) as error:
        shell("localhost/no-such-image:7", "true").build()
    assert error.value.field == "sandbox.image" and "can't be pulled" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_agent_in_a_sandbox_is_answered():
    if bubblewrap_problem():
        pytest.skip(bubblewrap_problem())
    policy = Scripted(lambda context, request: "it is 4")
    code = (
        "import json, os, urllib.request as u, pathlib\n"
        "body = json.dumps({'messages': [{'role': 'user', 'content': 'begin'}]}).encode()\n"
        "head = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "said = json.load(u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, head)))\n"
        "assert said['choices'][0]['message']['content'] == 'it is 4'\n"
        f"assert not pathlib.Path({__file__!r}).exists()\n"
        "assert pathlib.Path('/proc/net/dev').read_text().count(':') == 1\n"
        "print(0.5)"
    )
    (completion,) = play(policy, AgentSpec(command=(sys.executable, "-c", code), sandbox="bubblewrap"))
    assert completion.episode.reward == 0.5 and not completion.episode.failure


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"run": "json:load", "container": "x"}, "container"),
        ({"command": ("x",), "container": {"image": "x", "size": 3}}, "container.size"),
        ({"command": ("x",), "container": {"image": "x", "engine": "lxc"}}, "container.engine"),
        ({"command": ("x",), "container": {"image": "-v/:/host"}}, "container.image"),
        ({"command": ("x",), "container": {"image": "x", "memory_mb": 1}}, "container.memory_mb"),
        ({"command": ("x",), "container": {"image": "x", "mounts": ["/nowhere/at/all"]}}, "container.mounts"),
        ({"command": ("x",), "container": {"memory_mb": 100}}, "container.image"),
        ({"command": ("x",), "container": "x", "sandbox": "bubblewrap"}, "sandbox"),
        ({"command": ("x",), "sandbox": "chroot"}, "sandbox"),
        ({"command": ("x",), "sandbox": "container"}, "sandbox.image"),
    ],
)
def test_bad_specs(fields, field):
    with pytest.raises(FieldError) as error, as_in_recipe(AgentSpec, fields):
        make_agent(AgentSpec, fields, "agent").build()
    assert error.value.field == field


def test_agents_are_closed_where_another_task_is_wrong():
    if bubblewrap_problem():
        pytest.skip(bubblewrap_problem())
    agent = {"kind": "agent", "command": ["true"], "sandbox": "bubblewrap"}
    good, bad = (SimpleNamespace(environment=agent | fields, tools=()) for fields in ({}, {"size": 1}))
    folders = partial(Path(tempfile.gettempdir()).glob, f"proxima-*-{os.getpid()}-*")
    before = {*folders()}  # of fixtures
    with pytest.raises(FieldError, match="eval.task.environment.size"):
        play = Play(settings=EpisodeSettings(tool_format="xml"), system="", arguments={}, seed=0)
        make_worlds({"task": good, "eval.task": bad}, {}, None, play, [])
    assert {*folders()} <= before


def test_an_agent_without_a_box_loads_none_of_it():
    code = "from proxima.environment.agent_kinds import AgentSpec; import sys; AgentSpec(command=('x',)).build(); "
    code += "print([name for name in sys.modules if 'proxima_worlds' in name])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_an_agent_in_a_container_of_docker(busybox_image, docker_log):
    policy = Scripted(lambda context, request: "it is 4")
    (completion,) = play(policy, shell(busybox_image, ASKS, engine="docker"))
    assert completion.episode.reward == 0.5 and left() == []
    asked = {line.partition(" ")[0] for line in docker_log.read_text().splitlines()}
    assert {"image", "run", "ps"} <= asked and "pull" not in asked
    said = docker_log.read_text()  # of no variable is the value in a list of processes, which other users could read
    assert "--env-file=" in said and "--env=" not in said and "OPENAI_API_KEY=" not in said


def test_docker_knows_every_option_of_the_command_line(tmp_path, monkeypatch):
    """The real client reads its command line before it looks for a daemon."""
    if (docker := shutil.which("docker")) is None:
        pytest.skip("docker is not installed")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    (tmp_path / "variables").write_text("A=1\n")
    mounts = (str(tmp_path),)
    limits = Container(image="x", workdir="/work", mounts=mounts).limits()
    common = [
        "--name=x",
        "--label=proxima.run=x",
        "--log-driver=none",
        "--stop-signal=KILL",
        f"--env-file={tmp_path / 'variables'}",
        "--volume=x-0:/app",
        "--interactive",
    ]
    for options in (limits, Container(image="x", writable=True, network=True).limits()):
        line = [docker, "run", "--rm", *common, *options, f"--entrypoint={RELAY}", "x", "/proxima", "0"]
        said = subprocess.run(line, capture_output=True, text=True)
        assert "docker daemon" in said.stderr and "unknown" not in said.stderr and "invalid" not in said.stderr


@pytest.mark.parametrize(("engine", "said"), [("auto", "neither podman nor docker is"), ("docker", "docker is not")])
def test_a_machine_without_an_engine(tmp_path, monkeypatch, engine, said):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FieldError, match=f"{said} installed; install podman") as error:
        AgentSpec(command=("x",), sandbox={"kind": "container", "image": "x", "engine": engine}).build()
    assert error.value.field == "sandbox.engine"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("sleep 1000", "did not finish `image inspect` in 1 s"),
        ('[ "$1" = image ] && exit 1; echo layer 1 of 2; sleep 1000', "can't be pulled: took longer than 1 s"),
        ('[ "$1" = run ] && sleep 1000; [ "$1" = image ] && echo 123; true', "did not finish `run --rm` in 1 s"),
        ('[ "$1" = image ] && echo 123; echo why >&2; exit 125', "can't be started by .*: why"),
    ],
)
def test_an_engine_that_hangs_or_fails(tmp_path, monkeypatch, script, said):
    """All that it has started is killed."""
    program = tmp_path / "podman"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("MARKED", str(tmp_path))
    for name in ("ANSWER_SECONDS", "PULL_SECONDS", "TRIAL_SECONDS"):
        monkeypatch.setattr(containers, name, 1.0)
    monkeypatch.setattr(containers, "compile_relay", lambda folder: Path(shutil.copy("/bin/true", folder / "relay")))
    ensure_image.cache_clear()
    with pytest.raises(FieldError, match=said) as error:
        AgentSpec(command=("x",), sandbox={"kind": "container", "image": "x"}).build()
    assert error.value.field.startswith("sandbox.") and "\n" not in str(error.value)
    eventually(lambda: not with_word("environ", f"MARKED={tmp_path}"))


def test_an_engine_that_is_no_program(tmp_path, monkeypatch):
    (tmp_path / "podman").write_bytes(b"\0\0\0")
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FieldError, match="can't be started: Exec format error") as error:
        AgentSpec(command=("x",), sandbox={"kind": "container", "image": "y"}).build()
    assert error.value.field == "sandbox.engine"
