"""Worker processes: order, limits, death and replacement."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from proxima.process.worker import ForkServer
from proxima.reward.base import Job
from proxima.reward.workers.pool import WorkerPool
from tests.processes import assert_all_end, eventually, family
from tests.reward.make import LONG, SHORT

pytestmark = pytest.mark.usefixtures("lent_servers")


def regex(text, pattern=r"\d+"):
    return Job(grader="regex", arguments={"pattern": pattern, "text": text})


# Backtracks 2^n ways before it gives up, inside one C call that no thread can interrupt.
HANGS = regex("a" * 40 + "!", r"(?:a+)+$")
SPINS = replace(HANGS, cpu_seconds=0.1)


def code(tmp_path: Path, body: str) -> Job:
    """A job that runs `body` in the worker: loading a module executes it."""
    file = tmp_path / f"module_{abs(hash(body))}.py"
    file.write_text(textwrap.dedent(body) + "\ndef fn(): pass\n")
    return Job(grader="load", arguments={"path": f"{file}:fn"})


@pytest.fixture
def pool(request):
    made = WorkerPool(**{"timeout": LONG, **getattr(request, "param", {})})
    yield made
    made.close()


def found(answers):
    return [None if answer.value is None else answer.value["answer"] for answer in answers]


@pytest.mark.parametrize("pool", [{"workers": 1}, {"workers": 3}], indirect=True, ids=["one", "three"])
def test_answers_keep_the_order_of_the_jobs(pool):
    jobs = [regex(f"x{i}") for i in range(200)]
    assert found(asyncio.run(pool.run(jobs))) == [str(i) for i in range(200)]
    assert asyncio.run(pool.run([])) == []


def test_many_callers_and_several_event_loops_share_a_pool(pool):
    async def both():
        return await asyncio.gather(*(pool.run([regex(f"a{i}"), regex("none")]) for i in range(20)))

    for _ in range(2):
        assert [found(answers) for answers in asyncio.run(both())] == [[str(i), None] for i in range(20)]
    assert pool.started == 1


@pytest.mark.slow
def test_a_hung_job_costs_itself_only(pool):
    """Each kind of limit: of the job, of its CPU time, and of the pool, which others have too."""
    jobs = [regex("1"), replace(HANGS, seconds=SHORT), regex("3"), SPINS, replace(regex("5"), cpu_seconds=9.0)]
    answers = asyncio.run(pool.run(jobs))
    assert found(answers) == ["1", None, "3", None, "5"] and pool.started == 3
    errors = [answer.error for answer in answers if answer.error]
    assert errors == [f"timed out after {SHORT:g} s", "timed out after 0.1 s of CPU time"]


@pytest.mark.slow
@pytest.mark.parametrize("pool", [{"timeout": SHORT}], indirect=True)
def test_the_limit_of_a_pool_is_that_of_its_jobs(pool):
    hung, own = asyncio.run(pool.run([HANGS, replace(regex("2"), seconds=LONG)]))
    assert hung.error == f"timed out after {SHORT:g} s" and found([own]) == ["2"]


def gives_up(tmp_path, error):
    (tmp_path / "broken.py").write_text(f"def __getattr__(name):\n    raise {error}('told')\n")
    return Job(grader="load", arguments={"path": f"{tmp_path}/broken.py:fn"})


def writes(tmp_path, written):
    """A job that writes into open files."""
    body = f"""
    import os
    for fd in range(3, 64):
        try: os.write(fd, {written})
        except OSError: pass
    """
    return code(tmp_path, body)


WRITTEN = ("b'x' * 4096 + b'\\n'", "b'\\n'", "b'[' * 200_000 + b'\\n'", "b'x' * (1 << 20)", "b'{'", r"b'\xff\n'")
WRITTEN += (r"""b'{"result": {"value": 99}}\n'""",)
FAULTS = {  # the job, its error, and how many workers there were
    "no pattern": (lambda _: regex("1", "("), "missing \\)", 1),
    "no grader": (lambda _: Job(grader="none", arguments={}), "^KeyError: 'none'$", 1),
    "no JSON": (lambda _: Job(grader="regex", arguments={"text": object()}), "can't be sent to a worker", 1),
    "memory": (lambda tmp_path: code(tmp_path, "big = bytes(900 << 20)"), "MemoryError", 1),
    "exit": (lambda tmp_path: code(tmp_path, "import os; os._exit(3)"), "^its worker ended$", 2),
    "abort": (lambda tmp_path: code(tmp_path, "import os; os.abort()"), r"^its worker died \(SIGABRT\)$", 2),
    **{error: (partial(gives_up, error=error), f"^{error}: told$", 2) for error in ("RecursionError", "MemoryError")},
    **{text: (partial(writes, written=text), "something wrote into its worker's socket", 2) for text in WRITTEN},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("pool", [{"memory_mb": 512}], indirect=True, ids=["small"])
def test_a_job_that_fails_costs_none_of_the_others(pool, tmp_path, monkeypatch, fault):
    monkeypatch.setattr("proxima.process.worker.REPLY_BYTES", 1 << 20)  # else the last text waits for its deadline
    job, error, workers = FAULTS[fault]
    answers = asyncio.run(pool.run([regex("1"), job(tmp_path), regex("3")]))
    assert found(answers) == ["1", None, "3"] and pool.started == workers
    assert re.search(error, answers[1].error) and "\n" not in answers[1].error


FORBIDDEN = {
    "open": "open({target!r}, 'w')",
    "os.open": "import os; os.open({target!r}, os.O_CREAT | os.O_WRONLY)",
    "system": "import os; os.system('touch ' + {target!r})",
    "subprocess": "import subprocess; subprocess.run(['touch', {target!r}])",
    "connect": "import socket; socket.create_connection(('127.0.0.1', 9))",
    "kill": "import os; os.kill(os.getppid(), 9)",
    "remove": "import os; os.remove({victim!r})",
}


def test_a_restricted_worker_reaches_nothing(pool, tmp_path):
    target, victim = tmp_path / "target", tmp_path / "victim"
    victim.write_text("here")
    bodies = [body.format(target=str(target), victim=str(victim)) for body in FORBIDDEN.values()]
    *answers, last = asyncio.run(pool.run([*(code(tmp_path, body) for body in bodies), regex("2")]))
    for name, answer in zip(FORBIDDEN, answers, strict=True):
        refused = answer.error or ""
        assert "PermissionError" in refused and "is not allowed in a reward worker" in refused, (name, answer)
    assert not target.exists() and victim.exists()
    assert found([last]) == ["2"] and pool.started == 1


def test_workers_that_die_at_once_cost_the_job(pool, monkeypatch):
    fork, dead = ForkServer.fork, []

    def stillborn(self, **limits):
        worker = fork(self, **limits)
        if len(dead) < 3:
            os.kill(worker.pid, signal.SIGKILL)
            assert_all_end([worker.pid])
            dead.append(worker)
        return worker

    monkeypatch.setattr(ForkServer, "fork", stillborn)
    answers = asyncio.run(pool.run([regex("1"), regex("2")]))
    assert answers[0].error == "two workers in a row died before they started on it"
    assert found(answers) == [None, "2"] and len(dead) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
def test_a_worker_killed_while_idle_costs_nothing(pool):
    assert found(asyncio.run(pool.run([regex("1")]))) == ["1"]
    _, _, worker = family(pool._server.child.process.pid)
    os.kill(worker, signal.SIGKILL)
    assert_all_end([worker])
    assert found(asyncio.run(pool.run([regex("2"), regex("3")]))) == ["2", "3"]
    assert pool.started == 2


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
@pytest.mark.parametrize("which", ["fork server", "the process above it"])
@pytest.mark.parametrize("pool", [{"workers": 2}], indirect=True, ids=["two"])
def test_a_killed_fork_server_is_replaced(pool, which):
    assert found(asyncio.run(pool.run([regex("1")]))) == ["1"]
    above, fork_server, *_ = family(pool._server.child.process.pid)
    killed = fork_server if which == "fork server" else above
    os.kill(killed, signal.SIGKILL)
    assert_all_end([killed, above])
    asyncio.run(pool.run([regex("2")]))  # the worker may outlive the fork server by this job, or be gone already
    assert found(asyncio.run(pool.run([SPINS, regex("3")])))[1] == "3"
    asyncio.run(pool.run([SPINS] * 4))  # each ends a worker, so that another must start
    assert found(asyncio.run(pool.run([regex("4")]))) == ["4"]
    assert_all_end([fork_server])


def test_workers_are_recycled(pool, monkeypatch):
    monkeypatch.setattr("proxima.reward.workers.pool.RECYCLE", 10)
    for _ in range(5):
        assert found(asyncio.run(pool.run([regex(str(i)) for i in range(5)]))) == list("01234")
    assert pool.started == 3


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
@pytest.mark.parametrize("pool", [{"restricted": False}], indirect=True)
def test_close_ends_everything_even_a_job_that_hangs(pool, tmp_path):
    begun = tmp_path / "begun"
    hangs = code(tmp_path, f"import time; open({str(begun)!r}, 'w'); time.sleep(6000)")

    async def closed():
        running = asyncio.ensure_future(pool.run([hangs, regex("2")]))
        while not begun.exists():
            await asyncio.sleep(0.01)
        processes = family(pool._server.child.process.pid)
        pool.close()
        pool.close()
        return await running, processes

    answers, processes = asyncio.run(closed())
    assert [answer.value for answer in answers] == [None, None] and all(answer.error for answer in answers)
    assert_all_end(processes)
    with pytest.raises(RuntimeError, match="the workers are closed"):
        asyncio.run(pool.run([regex("1")]))


ORPHANS = """
import asyncio, sys, threading
from proxima.reward.base import Job
from proxima.reward.workers.pool import WorkerPool
pool = WorkerPool(timeout=600)
job = Job(grader="regex", arguments={"pattern": "(?:a+)+$", "text": "a" * 40 + "!"})
threading.Thread(target=lambda: asyncio.run(pool.run([job])), daemon=True).start()
sys.stdin.read()
"""


@pytest.mark.slow
def test_no_process_outlives_a_run_that_exits():
    with subprocess.Popen([sys.executable, "-c", ORPHANS], stdin=subprocess.PIPE) as run:
        eventually(lambda: run.poll() is not None or len(family(run.pid)) == 4)
        processes = family(run.pid)
        run.stdin.close()
    assert len(processes) == 4
    assert_all_end(processes)
