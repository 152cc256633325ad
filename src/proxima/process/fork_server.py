"""The counterpart of `process.worker`, in a process of its own. Standard library only.

One parent process, the fork server, loads what the jobs need and forks workers on request, so that a new worker
costs milliseconds. A worker reads one job per line of JSON and replies to each with a line, until its socket closes.
That line holds the job's id, a secret, so nothing else written into the socket can pass for a reply. The fork server
kills all workers when its own socket closes, that is, when the run ends, however it ends. Processes that a job started
end with its worker: the kernel hands orphans to the fork server, which kills them. The fork server's parent only waits:
when the fork server itself is killed, the kernel hands all its descendants to that parent, which kills them; when a job
stops it, that parent continues it.
"""

import errno
import importlib
import json
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from proxima.process.children import adopt_orphans, kill_children
from proxima.process.entry import end_with_parent
from proxima.process.json_lines import LineChannel
from proxima.process.limits import confine, limit, limit_growth
from proxima.process.linux_process import prefer_oom_kill


def fork_server(control: LineChannel) -> None:
    """Serve `fork` requests (which pass a socket) with a process id, and `kill` with the signal that ended the
    worker."""
    setup = control.receive()
    sys.path[:] = setup["path"]
    try:
        jobs = importlib.import_module(setup["jobs"])
        for warm_up in setup["warm_ups"]:
            name, _, function = warm_up.partition(":")
            module = importlib.import_module(name)
            if function:
                getattr(module, function)()
    except BaseException as error:
        control.send({"error": f"{type(error).__name__}: {error}"[:500]})
        return
    control.send({"ready": True})
    adopt_orphans()
    alive: set[int] = set()
    while True:
        data, fds, _, _ = socket.recv_fds(control.connection, 4096, 1)
        if not data:
            break
        request = json.loads(data)
        if request["do"] == "fork":
            pid = fork_worker(control.connection, fds[0], setup | request, jobs)
            alive.add(pid)
            control.send({"pid": pid})
        else:
            alive.discard(request["pid"])
            control.send({"status": kill(request["pid"])})
            kill_children(besides=alive)
    kill_children()


def fork_worker(control: socket.socket, fd: int, setup: dict[str, Any], jobs: Any) -> int:
    """Fork a worker that serves the socket `fd` and return its process id."""
    pid = os.fork()
    if pid:
        os.close(fd)
        return pid
    try:
        control.close()
        end_with_parent()  # if the fork server is killed, nothing else would end this worker
        prefer_oom_kill()
        if setup["restricted"]:
            limit_growth("AS", 0, setup["memory_mb"])
            limit("FSIZE", 0)
            limit("CORE", 0)
            confine("a reward worker")
        elif setup["memory_mb"]:  # libraries reserve address space that they never use, so limit the data segment
            limit_growth("DATA", 5, setup["memory_mb"])
        serve(socket.socket(fileno=fd), jobs)
    finally:
        os._exit(0)


def kill(pid: int) -> int:
    """Kill a worker if it still runs. Returns the signal that ended it, or 0."""
    os.kill(pid, signal.SIGKILL)  # nothing has waited for it yet, so the id can't have been reused
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def serve(channel: socket.socket, jobs: Any) -> None:
    """Run jobs until the socket closes, or until one exhausts memory, the recursion limit or the number of open files:
    the worker's state is then not trusted."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    os.register_at_fork(after_in_child=lambda: hang_up(channel))
    pid = os.getpid()
    for line in channel.makefile("rb"):
        result, last = run(json.loads(line), jobs)
        if os.getpid() != pid:  # the job forked, and its child returned
            os._exit(0)
        channel.sendall(result)
        if last:
            return


def hang_up(channel: socket.socket) -> None:
    """Close the socket in a process that a job forked: the socket must not stay open when the worker ends."""
    with suppress(OSError):
        os.close(channel.detach())


def run(job: dict[str, Any], jobs: Any) -> tuple[bytes, bool]:
    """The reply to one job, and whether the worker must exit. The kernel kills the worker when its CPU time is used
    up."""
    try:
        signal.setitimer(signal.ITIMER_PROF, job["cpu_seconds"] or 0.0)
        result = jobs.JOBS[job["job"]](**job["arguments"])
        line = json.dumps({"id": job["id"], "result": result})  # looked up after the job: a job that breaks it fails
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        return line.encode() + b"\n", False
    except BaseException as error:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        no_files = isinstance(error, OSError) and error.errno == errno.EMFILE
        last = no_files or isinstance(error, (MemoryError, RecursionError))
        why = str(error)
        if isinstance(error, MemoryError) and not why:
            why = "above the worker's limit"
        message = " ".join(f"{type(error).__name__[:100]}: {why}".split())[:300]
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        message += " ".join(["", *notes.split()])[:300]
        message = message.encode(errors="backslashreplace").decode()  # a lone surrogate can't be encoded
        return json.dumps({"id": job["id"], "error": message, "last": last}).encode() + b"\n", last


def outlive_fork_server(control: socket.socket) -> None:
    """Return in a child, which becomes the fork server; this process waits for it to end and kills what it left behind.
    Because it does not hold the fork server's memory, the kernel does not choose it when memory runs out."""
    adopt_orphans()
    pid = os.fork()
    if pid:
        control.close()
        while os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1]):  # by a job
            os.killpg(pid, signal.SIGCONT)
        kill_children()
        os._exit(0)
    os.setsid()  # a signal to the whole group of a worker does not reach it
    end_with_parent(signal.SIGCONT)  # a job may stop both, its parent first


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    from_run = socket.socket(fileno=int(sys.argv[1]))
    outlive_fork_server(from_run)
    fork_server(LineChannel(from_run))
