"""Agents that want the reward of a Harbor task without its work, in podman; and what a task can't do to its engine."""

import asyncio
import os
from pathlib import Path

import pytest

from proxima.data import FieldError
from proxima.environment.agents import AgentJob
from proxima.environment.hosts import EnvironmentFailure
from proxima.task import TASKS
from proxima_worlds.containers import client_environment
from proxima_worlds.harbor_agents import running_task, task_of
from tests.containers import busybox_image as busybox_image
from tests.containers import left
from tests.harbor_tasks import write_tasks
from tests.processes import eventually

pytestmark = [pytest.mark.slow, pytest.mark.waits]

TOML = "[environment]\nmemory_mb = 128\n[verifier]\ntimeout_sec = 8\n[agent]\ntimeout_sec = 60\n"
# `/bin/cat` by its path: the shell of busybox has a `cat` of its own.
TEST = """#!/bin/sh
if [ "$(/bin/cat /app/sum.txt 2> /dev/null)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
FILES = {"task.toml": TOML, "tests/test.sh": TEST}
WINNING = "echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json"
FORGES = f"while true; do mkdir -p /logs/verifier; {WINNING}; done"
REPLACES = "while true; do echo 'echo 1 > /logs/verifier/reward.json' > /tests/test.sh; chmod +x /tests/test.sh; done"
WAITS = "while ! test -e /tests/test.sh; do true; done; echo 42 > /app/sum.txt"
IN_BACKGROUND = {
    "a job": "({}) > /dev/null 2>&1 &",
    "a session": "setsid sh -c '{}' > /dev/null 2>&1 &",
    "an orphan": "sh -c \"(setsid sh -c '{}' > /dev/null 2>&1 &) &\"",
    "deaf": "(trap '' TERM INT HUP QUIT; {}) > /dev/null 2>&1 &",
}
LOOPS = {
    "forges": FORGES,
    "replaces": REPLACES.replace("'", '"'),
    "waits": WAITS,
    "waits for its folder": "cd /tests; while ! test -e test.sh; do true; done; echo 42 > /app/sum.txt",
}
WINS = "echo 1 > /logs/verifier/reward.txt"
OWN_SHELL = "cp /bin/busybox /app/busybox"
REPLACED = {  # programs that the tests call, by what is written in their place
    "cat": "#!/bin/busybox sh\necho 42\n",
    "sh": "#!/bin/busybox ash\necho 1 > /logs/verifier/reward.txt\n",
    "test": "#!/bin/busybox sh\nexit 0\n",
}
PROGRAMS = {
    f"its own {name}": f"printf '{text}' > /app/x; chmod +x /app/x; busybox mv -f /app/x /bin/{name}"
    for name, text in REPLACED.items()
} | {
    "its own program for all": f"{OWN_SHELL}; printf '#!/app/busybox sh\\n{WINS}\\n' > /app/x; chmod +x /app/x; "
    "/app/busybox mv -f /app/x /bin/busybox",
    "a program that goes before": "busybox mkdir -p /usr/local/sbin /usr/local/bin /usr/bin; for d in /usr/local/sbin "
    "/usr/local/bin /usr/bin; do printf '#!/bin/busybox sh\\necho 42\\n' > $d/cat; chmod +x $d/cat; done",
    "programs that are links": f"{OWN_SHELL}; printf '#!/app/busybox sh\\necho 42\\n' > /app/cat; chmod +x /app/cat; "
    "ln -sf /app/cat /bin/cat",
    "a folder of programs that is a link": f"{OWN_SHELL}; mkdir /app/bin; for p in sh busybox cat; do "
    f"printf '#!/app/busybox ash\\n{WINS}\\n' > /app/bin/$p; chmod +x /app/bin/$p; done; "
    "/app/busybox mv /bin /old; /app/busybox ln -s /app/bin /bin",
    "settings of shells": "for f in /etc/profile /root/.profile /.profile /root/.ashrc /etc/environment; do mkdir -p "
    "${f%/*}; echo 'echo 1 > /logs/verifier/reward.txt' > $f; done",
    "a library before all": "echo /app/x.so > /etc/ld.so.preload; echo x > /app/x.so; echo x > /etc/ld.so.cache",
    "users of its own": "echo 'root:x:0:0::/app:/app/x' > /etc/passwd; echo 'echo 1 > /logs/verifier/reward.txt' > "
    "/app/.profile",
}
HOSTILE = (
    PROGRAMS
    | {
        f"{loop} in {place}": place_text.format(text)
        for loop, text in LOOPS.items()
        for place, place_text in IN_BACKGROUND.items()
    }
    | {
        "a reward that was there": f"mkdir -p /logs/verifier; {WINNING}",
        "a folder of rewards that is a link": f"mkdir -p /app/l/verifier;mv /logs /app/o; ln -s /app/l /logs;{WINNING}",
        "a folder of rewards that is a file": "mv /logs /app/old; echo 1 > /logs",
        "a reward that is a folder": "mkdir -p /logs/verifier/reward.json",
        "a truncated reward": "echo '{' > /logs/verifier/reward.json",
        "a reward that is a pipe": "busybox mkfifo /logs/verifier/reward.json",
        "a test of its own": "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
        "tests that are a link": f"mv /tests /app/t; ln -s /app /tests; echo '{WINNING}' > /app/test.sh",
        "no shell": "/bin/rm -f /bin/sh",
        "no programs": "/bin/busybox rm -rf /bin",
        "nothing left": "/bin/busybox rm -rf / ; true",
        "no folder": "cd /; rm -rf /app",
        "all are killed": "kill -9 -1",
        "the first process is stopped": "kill -STOP 1; kill -9 1",
        "the relay replaced": "echo x > /proxima/relay; rm -f /proxima/relay /proxima/life",
        "a second relay": "(/proxima/relay /proxima 0 sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done') &",
        "a full disk of rewards": "dd if=/dev/zero of=/logs/verifier/x bs=1M count=300",
        "an answer that is a pipe": "busybox mkfifo /app/sum.txt",
        "an answer without end": "ln -s /dev/zero /app/sum.txt",
        "many processes": "i=0; while test $i -lt 200; do sleep 1000 & i=$((i+1)); done",
        "users that are a pipe": "rm -f /etc/passwd /etc/group; busybox mkfifo /etc/passwd; busybox mkfifo /etc/group",
        "a wrong answer": "echo 41 > /app/sum.txt",
    }
)
HONEST = {
    "at once": "echo 42 > /app/sum.txt",
    "by reading": "set -- $(cat numbers.txt); echo $(($1 + $2)) > sum.txt",
    "by way of /tmp": "echo 42 > /tmp/s; cp /tmp/s /app/sum.txt",
    "in the background": "(echo 42 > /app/sum.txt) & wait",
    "with a server that stays": "echo 42 > /app/sum.txt; (while true; do sleep 1; done) > /dev/null 2>&1 &",
    "with notes in the logs": "mkdir -p /logs/verifier; echo 0 > /logs/verifier/reward.json; echo 42 > /app/sum.txt",
    "by a script": "echo 'echo 42 > /app/sum.txt' > /app/s; chmod +x /app/s; sh /app/s; rm /app/s",
    "in folders that are new": "mkdir -p /app/a/b; echo 42 > /app/a/b/c; mv /app/a/b/c /app/sum.txt",
    "by a link": "echo 42 > /app/real; ln -s real /app/sum.txt",
    "by a second name": "echo 42 > /app/real; ln /app/real /app/sum.txt",
    "in a folder that was emptied": "rm -rf /app/* /app/.[a-z]*; echo 42 > sum.txt",
    "with a program of its own": "busybox mkdir -p /usr/local/bin; echo 'echo 42' > /usr/local/bin/n; sh "
    "/usr/local/bin/n > sum.txt",
    "by nobody": "chmod 777 /app; busybox chown 65534 /app; echo 42 > sum.txt; chmod 444 sum.txt",
    "until its limit": "echo 42 > /app/sum.txt; exec sleep 1000",
}


@pytest.fixture(scope="module")
def task(busybox_image, tmp_path_factory):
    task = TASKS["harbor"](path=str(write_tasks(tmp_path_factory.mktemp("tasks"), **FILES)))
    task.prepare()
    return task


@pytest.fixture(scope="module")
def shared():
    shared = {}
    yield shared
    for each in shared.values():
        each.close()


def judged(task, shared, codes, most=4):
    """The rewards of agents that run these codes in the shell, by name."""
    row = {"harbor": task.rows(0)[0].metadata["harbor"]}
    read, containers = task_of(row, shared)
    places = asyncio.Semaphore(most)
    job = AgentJob(row=row, base_url="http://127.0.0.1:9/v1", api_key="k")

    async def one(code):
        async with places, running_task(containers, read, job) as container:
            await container.run(["sh", "-c", code], 5 if "exec sleep" in code else 20, user=read.agent_user)
            return await container.reward()

    async def run():
        rewards = await asyncio.gather(*(one(code) for code in codes.values()), return_exceptions=True)
        return dict(zip(codes, rewards, strict=True))

    return asyncio.run(run())


SMALL = (
    "its own cat",
    "its own sh",
    "a folder of rewards that is a link",
    "forges in a session",
    "waits in deaf",
    "no shell",
)


def test_what_stays_behind_forges_nothing(task, shared):
    rewards = judged(task, shared, {name: HOSTILE[name] for name in SMALL})
    assert rewards == dict.fromkeys(SMALL, 0.0)


def test_work_that_is_kept_is_rewarded(task, shared):
    names = ("by way of /tmp", "with a server that stays")
    assert judged(task, shared, {name: HONEST[name] for name in names}) == dict.fromkeys(names, 1.0)
    eventually(lambda: left() == [])


def test_where_all_is_carried_an_agent_may_forge(busybox_image, shared, tmp_path):
    """That the agents above are hostile shows where nothing stands in their way."""
    task = TASKS["harbor"](path=str(write_tasks(tmp_path, **FILES)), carried=["/"])
    task.prepare()
    names = ("its own cat", "its own sh", "programs that are links", "a folder of programs that is a link")
    assert judged(task, shared, {name: PROGRAMS[name] for name in names}) == dict.fromkeys(names, 1.0)


def test_work_elsewhere_counts_where_it_is_carried(busybox_image, shared, tmp_path, capsys):
    """The task's answer is beside the folder in which the agent starts."""
    test = "#!/bin/sh\nif test -x /work/answer; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    folder = write_tasks(tmp_path, **{"task.toml": TOML, "tests/test.sh": test})
    work = {"": "mkdir -p /work; echo > /work/answer; chmod +x /work/answer"}
    for carried, reward in ((), 0.0), (("/work",), 1.0), (("/",), 1.0):
        task = TASKS["harbor"](path=str(folder), carried=carried)
        task.prepare()
        assert judged(task, shared, work) == {"": reward}
        said = "the agent of answer has also changed '/work/answer' (1 in all)" in capsys.readouterr().err
        assert said == (not reward)
    eventually(lambda: left() == [])


def test_an_agent_that_starts_among_the_programs(busybox_image, tmp_path):
    path = str(write_tasks(tmp_path, **{"task.toml": TOML, "environment/Dockerfile": f"FROM {busybox_image}\n"}))
    with pytest.raises(FieldError, match="agent of answer works, or /: it starts in /") as error:
        TASKS["harbor"](path=path).prepare()
    assert error.value.field == "carried"
    TASKS["harbor"](path=path, carried=["/"]).prepare()


@pytest.mark.parametrize("carried", ["/app", [5], ["app"], ["/app/"], ["/a/../b"], ["/tests/x"], ["/logs"], ["/a:b"]])
def test_folders_that_can_not_be_carried(tmp_path, carried):
    with pytest.raises(FieldError, match="must be a list of absolute paths of folders"):
        TASKS["harbor"](path=str(tmp_path), carried=carried)


def test_programs_in_the_folder_of_work_are_named(busybox_image, tmp_path, capsys):
    image = f"FROM {busybox_image}\nWORKDIR /app\nENV PATH=/app/bin:/bin\n"
    path = str(write_tasks(tmp_path, **{"task.toml": TOML, "environment/Dockerfile": image}))
    TASKS["harbor"](path=path).prepare()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("harbor:")]
    assert line.startswith("harbor: answer: PATH of the image has /app/bin")


@pytest.mark.campaign("packages/proxima-worlds/tests/test_hostile_harbor.py::test_what_stays_behind_forges_nothing")
def test_no_hostile_agent_is_rewarded_and_each_honest_one_is(task, shared):
    assert len(HOSTILE) >= 30 and len(HONEST) >= 7
    rewards = judged(task, shared, HOSTILE | HONEST)
    assert rewards == dict.fromkeys(HOSTILE, 0.0) | dict.fromkeys(HONEST, 1.0)
    eventually(lambda: left() == [])


def test_a_broken_test_is_a_failure_and_no_reward(busybox_image, shared, tmp_path):
    broken = {"task.toml": TOML, "tests/test.sh": "#!/bin/sh\nexit 1\n"}
    task = TASKS["harbor"](path=str(write_tasks(tmp_path, **broken)))
    task.prepare()
    (reward,) = judged(task, shared, {"": "echo 42 > /app/sum.txt"}).values()
    assert isinstance(reward, EnvironmentFailure)


HOSTS = ["LD_PRELOAD", "TMPDIR", "CONTAINER_HOST", "DOCKER_HOST", "HOME", "PATH", "PYTHONPATH"]


def test_variables_of_a_task_never_reach_the_engine(busybox_image, shared, tmp_path):
    """Each would break the engine's program, or be loaded into it."""
    library = tmp_path / "hook.so"
    source = tmp_path / "hook.c"
    mark = tmp_path / "mark"
    source.write_text(
        "#include <stdio.h>\n__attribute__((constructor)) static void f(void)"
        f'{{ FILE *m = fopen("{mark}", "w"); if (m) fclose(m); }}\n'
    )
    assert os.spawnlp(os.P_WAIT, "cc", "cc", "-shared", "-fPIC", str(source), "-o", str(library)) == 0
    values = dict.fromkeys(HOSTS, "/nowhere") | {"LD_PRELOAD": str(library), "PATH": "/bin", "SPACED": " a=b #c "}
    own = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    test = "#!/bin/sh\n" + "".join(f'test "${name}" = {value!r} || exit 1\n' for name, value in values.items())
    test += "echo 1 > /logs/verifier/reward.txt\n"
    task = TASKS["harbor"](
        path=str(
            write_tasks(tmp_path / "tasks", **{"task.toml": f"{TOML}[environment.env]\n{own}", "tests/test.sh": test})
        )
    )
    task.prepare()
    assert judged(task, shared, {"": "true"}) == {"": 1.0}
    assert not mark.exists()


def test_the_environment_of_an_engine_is_small(monkeypatch):
    for name in ("HF_TOKEN", "LD_PRELOAD", "PYTHONPATH", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "x")
    assert not {"HF_TOKEN", "LD_PRELOAD", "PYTHONPATH", "WANDB_API_KEY"} & {*client_environment()}


def test_a_secret_is_given_only_where_the_recipe_names_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    own = '[environment]\ndocker_image = "x"\n[environment.env]\nA = "${HF_TOKEN}"\nB = "${HF_HOME:-none}"\n'
    monkeypatch.setenv("HF_HOME", "/secret")
    path = str(write_tasks(tmp_path, **{"task.toml": own}))
    with pytest.raises(FieldError, match=r"'HF_TOKEN', not named in task\.variables"):
        TASKS["harbor"](path=path).rows(0)
    rows = TASKS["harbor"](path=path, variables=["HF_TOKEN"])._tasks()
    assert rows[0].variables == {"A": "hf_secret", "B": "none"}


@pytest.mark.parametrize("name", ["instruction.md", "task.toml"])
def test_a_link_of_a_task_leads_to_no_file_of_this_machine(tmp_path, name):
    folder = write_tasks(tmp_path / "tasks")
    secret = tmp_path / "secret"
    secret.write_text("version = '1'")
    place = Path(folder, "answer", name)
    place.unlink()
    place.symlink_to(secret)
    with pytest.raises(FieldError, match="is a link that leaves the folder"):
        TASKS["harbor"](path=str(folder)).rows(0)
