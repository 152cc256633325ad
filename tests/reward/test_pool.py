"""Worker processes: order, limits, death and replacement."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from proxima.data.worker import ForkServer
from proxima.reward.base import Job
from proxima.reward.workers.pool import WorkerPool
from tests.processes import is_running


def regex(text, pattern=r"\d+", cpu_seconds=None):
    return Job(grader="regex", arguments={"pattern": pattern, "text": text}, cpu_seconds=cpu_seconds)


# Backtracks 2^n ways before it gives up, inside one C call that no thread can interrupt.
HANGS = regex("a" * 40 + "!", r"(?:a+)+$")


def code(tmp_path: Path, body: str) -> Job:
    """A job that runs `body` in the worker: loading a module executes it."""
    file = tmp_path / f"module_{abs(hash(body))}.py"
    file.write_text(textwrap.dedent(body) + "\ndef fn(): pass\n")
    return Job(grader="load", arguments={"path": f"{file}:fn"})


@pytest.fixture
def pool(request):
    made = WorkerPool(**getattr(request, "param", {}))
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


@pytest.mark.parametrize("pool", [{"timeout": 1.0}], indirect=True)
def test_a_hung_job_costs_itself_only(pool):
    answers = asyncio.run(pool.run([regex("1"), HANGS, regex("3"), HANGS, regex("5")]))
    assert found(answers) == ["1", None, "3", None, "5"]
    assert [answer.error for answer in answers] == [None, "timed out after 1 s", None, "timed out after 1 s", None]
    assert pool.started == 3


@pytest.mark.parametrize("pool", [{"timeout": 600}], indirect=True)
def test_the_cpu_limit_ends_what_the_clock_would_allow(pool):
    answers = asyncio.run(pool.run([regex("a" * 40 + "!", r"(?:a+)+$", cpu_seconds=0.2), regex("2", cpu_seconds=0.2)]))
    assert answers[0].error == "timed out after 0.2 s of CPU time"
    assert found(answers) == [None, "2"]


def test_exceptions_are_one_line(pool):
    answers = asyncio.run(pool.run([regex("1", "("), Job(grader="none", arguments={}), regex("2")]))
    assert answers[0].error.startswith("error: missing )") or "missing )" in answers[0].error
    assert answers[1].error == "KeyError: 'none'"
    assert found(answers) == [None, None, "2"]
    assert pool.started == 1


def test_an_argument_that_is_no_json_is_its_own_error(pool):
    answers = asyncio.run(pool.run([regex("1"), Job(grader="regex", arguments={"text": object()}), regex("3")]))
    assert found(answers) == ["1", None, "3"]
    assert "can't be sent to a worker" in answers[1].error


@pytest.mark.parametrize("error", ["RecursionError", "MemoryError"])
def test_a_worker_that_gives_up_after_a_job_costs_none_of_the_others(pool, tmp_path, error):
    broken = Job(grader="load", arguments={"path": f"{tmp_path}/broken.py:fn"})
    (tmp_path / "broken.py").write_text(f"def __getattr__(name):\n    raise {error}('told')\n")
    answers = asyncio.run(pool.run([regex("1"), broken, regex("3"), broken, regex("5")]))
    assert [answer.error for answer in answers] == [None, f"{error}: told", None, f"{error}: told", None]
    assert found(answers) == ["1", None, "3", None, "5"] and pool.started == 3


@pytest.mark.parametrize("written", ["b'x' * 4096 + b'\\n'", "b'\\n'", "b'[' * 200_000 + b'\\n'", "b'x' * (1 << 20)"])
def test_a_job_that_writes_into_open_files_costs_itself_only(pool, tmp_path, monkeypatch, written):
    monkeypatch.setattr("proxima.data.worker.REPLY_BYTES", 1 << 20)  # else the last one waits for its deadline
    body = f"""
    import os
    for fd in range(3, 64):
        try: os.write(fd, {written})
        except OSError: pass
    """
    answers = asyncio.run(pool.run([regex("1"), code(tmp_path, body), regex("3")]))
    assert found(answers) == ["1", None, "3"] and "something wrote into its worker's socket" in answers[1].error


@pytest.mark.parametrize("pool", [{"memory_mb": 128}], indirect=True)
def test_memory_is_limited_and_the_worker_replaced(pool, tmp_path):
    answers = asyncio.run(pool.run([code(tmp_path, "big = [0] * (64 << 20)"), regex("2")]))
    assert "MemoryError" in answers[0].error
    assert found(answers[1:]) == ["2"]


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


def test_death_is_reported_and_the_rest_continues(pool, tmp_path):
    answers = asyncio.run(
        pool.run(
            [regex("1"), code(tmp_path, "import os; os._exit(3)"), code(tmp_path, "import os; os.abort()"), regex("4")]
        )
    )
    assert [answer.error for answer in answers] == [None, "its worker ended", "its worker died (SIGABRT)", None]
    assert found(answers)[3] == "4"


def test_a_worker_killed_while_idle_costs_nothing(pool):
    assert found(asyncio.run(pool.run([regex("1")]))) == ["1"]
    (fork_server,) = children(pool._fork_server._process.pid)
    (worker,) = children(fork_server)
    os.kill(worker, signal.SIGKILL)
    while is_running(worker):
        time.sleep(0.01)
    assert found(asyncio.run(pool.run([regex("2"), regex("3")]))) == ["2", "3"]
    assert pool.started == 2


def test_workers_that_die_at_once_cost_the_job(pool, monkeypatch):
    fork, dead = ForkServer.fork, []

    def stillborn(self):
        worker = fork(self)
        if len(dead) < 3:
            os.kill(worker._pid, signal.SIGKILL)
            while is_running(worker._pid):
                time.sleep(0.01)
            dead.append(worker)
        return worker

    monkeypatch.setattr(ForkServer, "fork", stillborn)
    answers = asyncio.run(pool.run([regex("1"), regex("2")]))
    assert answers[0].error == "two workers in a row died before they started on it"
    assert found(answers) == [None, "2"] and len(dead) == 3


def children(pid):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(word) for word in listed.split()]


@pytest.mark.parametrize("which", ["fork server", "the process above it"])
@pytest.mark.parametrize("pool", [{"workers": 2}], indirect=True, ids=["two"])
def test_a_killed_fork_server_is_replaced(pool, which):
    assert found(asyncio.run(pool.run([regex("1")]))) == ["1"]
    above = pool._fork_server._process
    (fork_server,) = children(above.pid)
    os.kill(above.pid if which != "fork server" else fork_server, signal.SIGKILL)
    above.wait()
    asyncio.run(pool.run([regex("2")]))  # the worker may outlive the fork server by this job, or be gone already
    assert found(asyncio.run(pool.run([HANGS_SHORT, regex("3")])))[1] == "3"
    asyncio.run(pool.run([HANGS_SHORT] * 4))  # each ends a worker, so that another must start
    assert found(asyncio.run(pool.run([regex("4")]))) == ["4"]
    deadline = time.monotonic() + 20
    while is_running(fork_server) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(fork_server)


HANGS_SHORT = regex("a" * 40 + "!", r"(?:a+)+$", cpu_seconds=0.1)


@pytest.mark.parametrize("pool", [{"recycle": 10}], indirect=True)
def test_workers_are_recycled(pool):
    for _ in range(5):
        assert found(asyncio.run(pool.run([regex(str(i)) for i in range(5)]))) == list("01234")
    assert pool.started == 3


def test_close_ends_everything_and_says_so():
    pool = WorkerPool()
    asyncio.run(pool.run([regex("1")]))
    fork_server = pool._fork_server._process
    pool.close()
    pool.close()
    assert fork_server.poll() is not None
    with pytest.raises(RuntimeError, match="the reward pool is closed"):
        asyncio.run(pool.run([regex("1")]))


def test_close_while_a_worker_hangs():
    async def main():
        pool = WorkerPool(timeout=600)
        running = asyncio.ensure_future(pool.run([HANGS, regex("2")]))
        await asyncio.sleep(0.2)
        pool.close()
        return await running

    answers = asyncio.run(main())
    assert [answer.value for answer in answers] == [None, None]
    assert all(answer.error for answer in answers)


ORPHANS = """
import asyncio, sys, threading, os
from proxima.reward.base import Job
from proxima.reward.workers.pool import WorkerPool
pool = WorkerPool(timeout=600)
job = Job(grader="regex", arguments={"pattern": "(?:a+)+$", "text": "a" * 40 + "!"})
threading.Thread(target=lambda: asyncio.run(pool.run([job])), daemon=True).start()
while not pool.started: pass
print(pool._fork_server._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["exit", "kill", "kill the fork server"])
def test_no_process_outlives_the_run(how):
    run = subprocess.Popen([sys.executable, "-c", ORPHANS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    above = int(run.stdout.readline())
    (fork_server,) = children(above)
    family = [above, fork_server, *children(fork_server)]
    assert len(family) == 3
    if how == "kill the fork server":
        os.kill(fork_server, signal.SIGKILL)
    if how != "exit":
        run.kill()
    run.communicate()
    for _ in range(6000):
        if not (alive := [pid for pid in family if is_running(pid)]):
            return
        time.sleep(0.05)
    raise AssertionError(f"still running: {alive}")


@pytest.mark.parametrize(("field", "value"), [("workers", 0), ("timeout", 0)])
def test_bad_fields(field, value):
    with pytest.raises(ValueError, match=f"{field}={value} must be >"):
        WorkerPool(**{field: value})
