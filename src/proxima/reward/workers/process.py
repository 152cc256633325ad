"""The process side of the pool, run as a script. Standard library only.

One parent process (the nursery) loads what the graders need and forks workers on request, so that a new worker costs
milliseconds. A worker reads a line of JSON, a list of jobs, and answers each job with two lines, that it begins and
what came of it, until its socket closes. Both hold the job's id, a secret: what anybody else writes into the socket
can't pass for an answer. The nursery ends all workers when its own socket closes, that is, when the run dies, however
it dies.

The limits of a restricted worker hold a text that runs away, and one that gets itself evaluated by a careless parser,
from doing harm. They are no sandbox against somebody who can choose the code.
"""

import importlib.util
import json
import logging
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def load_graders() -> Any:
    """The graders next to this file, loaded by their place: importing the package would load torch."""
    spec = importlib.util.spec_from_file_location("proxima_graders", Path(__file__).with_name("graders.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def fork_server(control: socket.socket) -> None:
    """Answer `fork` (with a socket) by a process id and `end` by how that worker ended, until the control socket
    closes."""
    setup = json.loads(control.makefile("rb", buffering=0).readline())
    sys.path[:] = setup["path"]
    try:
        graders = load_graders()
        for kind in setup["warm"]:
            graders.WARM[kind]()
    except BaseException as problem:
        reply(control, {"error": f"{type(problem).__name__}: {problem}"[:500]})
        return
    reply(control, {"ready": True})
    alive: set[int] = set()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 4096, 1)
        if not data:
            break
        request = json.loads(data)
        if request["do"] == "fork":
            alive.add(pid := fork_worker(control, fds[0], setup, graders))
            reply(control, {"pid": pid})
        else:
            alive.discard(request["pid"])
            reply(control, {"status": end(request["pid"])})
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


def fork_worker(control: socket.socket, fd: int, setup: dict[str, Any], graders: Any) -> int:
    """A new worker that serves the socket `fd`; its process id."""
    pid = os.fork()
    if pid:
        os.close(fd)
        return pid
    try:
        control.close()
        die_first()
        if setup["restricted"]:
            restrict(setup["memory_mb"])
        serve(socket.socket(fileno=fd), graders)
    finally:
        os._exit(0)


def die_first() -> None:
    """Where memory runs out, the kernel shall end this worker and not the run."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def end(pid: int) -> int:
    """Kill a worker if it still runs; the signal that ended it, or 0."""
    os.kill(pid, signal.SIGKILL)  # not yet waited for, so the id is still its own
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def restrict(memory_mb: int) -> None:
    """No more than `memory_mb` MiB beyond what is held now, no file written, no process started, no connection made."""
    with open("/proc/self/statm") if os.path.exists("/proc/self/statm") else open(os.devnull) as statm:
        pages = int((statm.read().split() or ["0"])[0])
    if pages:
        limit = pages * resource.getpagesize() + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(refuse)


REFUSED = (
    *("subprocess.", "socket.connect", "socket.bind", "pty.", "shutil.", "ctypes.dlopen"),
    *(
        "os.system",
        "os.exec",
        "os.fork",
        "os.posix_spawn",
        "os.spawn",
        "os.kill",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.mkdir",
    ),
    *("os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown"),
)


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: what no grader does, and a text that gets itself evaluated might."""
    writes = (
        event == "open"
        and len(arguments) == 3
        and isinstance(arguments[2], int)
        and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    )
    if writes or event.startswith(REFUSED):
        raise PermissionError(f"{event} is not allowed in a reward worker")


def serve(channel: socket.socket, graders: Any) -> None:
    """Do jobs until the socket closes. Out of memory or recursion ends the worker: what is left of its state is not to
    be trusted."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    me = os.getpid()
    for line in channel.makefile("rb"):
        for job in json.loads(line):
            reply(channel, {"id": job["id"], "begun": True})
            result, last = run(job, graders)
            if os.getpid() != me:  # the job forked, and its child came back here
                os._exit(0)
            channel.sendall(result)
            if last:
                return


def run(job: dict[str, Any], graders: Any) -> tuple[bytes, bool]:
    """One job's line, and whether the worker ends after it. The kernel ends it when the CPU time is over, whatever it
    is doing."""
    try:
        signal.setitimer(signal.ITIMER_PROF, job["cpu_seconds"] or 0.0)
        line = json.dumps({"id": job["id"], "result": graders.GRADERS[job["grader"]](**job["arguments"])})
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        return line.encode() + b"\n", False
    except BaseException as problem:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        last = isinstance(problem, (MemoryError, RecursionError))
        message = " ".join(f"{type(problem).__name__}: {problem}".split())[:300]
        return json.dumps({"id": job["id"], "error": message, "last": last}).encode() + b"\n", last


def reply(control: socket.socket, message: dict[str, Any]) -> None:
    """One line to the pool."""
    control.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    fork_server(socket.socket(fileno=int(sys.argv[1])))
