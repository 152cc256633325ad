"""Runs one code after another in a container, each in a fork of this process, without a trace of those before it.

Servers of several containers share a socket, on which workers ask for processes as `proxima.process.code_runner` does.
Each code has a user of its
own, to whom /tmp belongs; there is no other place where it may write. After it the server, which is root with few
capabilities, kills all processes but itself and the first of the container, and empties /tmp. Standard library only.
"""

import json
import os
import select
import shutil
import signal
import socket
import stat
import sys
import time
from contextlib import suppress
from itertools import cycle

from proxima.process.children import ONE_THREAD
from proxima.process.code_process import run_code
from proxima.process.entry import prctl
from proxima.process.json_lines import LineChannel
from proxima.process.sandbox import USERS

PR_SET_DUMPABLE = 4  # lets a process read its own entries of /proc
REQUEST_BYTES = 4096
SECONDS = 10.0  # that the kernel may take to end processes
FOLDER = "/tmp"
RELAY = "/proxima/relay"  # the first process of a container
VARIABLES = ("LANG", *ONE_THREAD)  # kept for the code


def serve_codes(control: socket.socket) -> tuple[str, list[int], LineChannel]:
    """Serve codes until `control` closes; return, in a fork for each, what `run_code` takes."""
    with open("/proc/1/cmdline", encoding="utf-8", errors="replace") as first:
        if not first.read().startswith(RELAY):  # elsewhere it would kill all processes of the machine
            sys.exit("a server of code runs in a container only")
    _, (descriptor,), _, _ = socket.recv_fds(control, 1, 1)
    listener = socket.socket(fileno=descriptor)
    listener.setblocking(False)
    close_folders()
    control.sendall(b"\n")
    for user in cycle(USERS):
        connection = accepted(listener, control)
        data, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
        if not data:  # the worker was killed
            connection.close()
            continue
        os.chown(FOLDER, user, user)
        kind, limits, errors = json.loads(data)
        pid = os.fork()
        if pid == 0:
            for inherited in (control, listener, connection):
                inherited.close()
            channel, *files = descriptors
            become(user, files, errors, kept=channel)
            return kind, limits, LineChannel(socket.socket(fileno=channel))
        for each in descriptors:
            os.close(each)
        code = wait_for_end(pid, connection)
        with suppress(OSError), connection:  # a worker that was killed waits for nothing
            LineChannel(connection).send(code)
        empty_folder(user)
    raise AssertionError("a cycle has no end")


def accepted(listener: socket.socket, control: socket.socket) -> socket.socket:
    """The next connection of a worker; exits when the run has closed `control`."""
    while True:
        ready, _, _ = select.select([listener, control], [], [])
        if control in ready:
            os._exit(0)
        with suppress(BlockingIOError):  # another server was faster
            return listener.accept()[0]


def mounts() -> set[str]:
    """Where something is mounted."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
        return {line.split()[4] for line in lines}


def close_folders() -> None:
    """Leave no folder in which every user may write: what one code leaves there another would find."""
    for place in mounts():
        try:
            mode = os.stat(place).st_mode
            writable = not os.statvfs(place).f_flag & os.ST_RDONLY
        except OSError:  # it is under another, or in a folder that is closed
            continue
        if stat.S_ISDIR(mode) and mode & stat.S_IWOTH and writable:
            os.chmod(place, 0o755)


def become(user: int, files: list[int], errors: bool, kept: int) -> None:
    """Make this process one of the user in `FOLDER`, with these files as its standard streams."""
    os.setsid()
    told = files[1] if errors else os.open(os.devnull, os.O_WRONLY)
    for target, file in enumerate([*files, told]):
        os.dup2(file, target)
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)  # of another user than root, it has no capability
    prctl(PR_SET_DUMPABLE, 1)
    os.chdir(FOLDER)
    for name in {*os.environ} - {*VARIABLES}:
        del os.environ[name]
    os.environ |= {"HOME": FOLDER, "TMPDIR": FOLDER}
    sys.stdin = os.fdopen(0, closefd=False, encoding="utf-8")
    sys.stdout = os.fdopen(1, "w", closefd=False, encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", closefd=False, errors="backslashreplace", buffering=1, encoding="utf-8")


def wait_for_end(pid: int, connection: socket.socket) -> int:
    """The exit code of a process that has ended, or is killed when the worker hangs up, -N after signal N; the other
    processes are killed."""
    ended = os.pidfd_open(pid)
    select.select([ended, connection.fileno()], [], [])
    deadline = time.monotonic() + SECONDS
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # of a process that has ended, the exit code stays
    os.close(ended)
    _, status = os.waitpid(pid, 0)
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(-1, signal.SIGKILL)  # all but this process and the first of the container
            time.sleep(0.001)
        os._exit(1)
    return os.waitstatus_to_exitcode(status)


def empty_folder(user: int) -> None:
    """Empty `FOLDER`, as the user, but for what is mounted in it, such as proxima's modules; where that fails, the
    server ends, and its container with it."""
    mounted = {place.removeprefix(f"{FOLDER}/").split("/")[0] for place in mounts() if place.startswith(f"{FOLDER}/")}
    try:
        os.seteuid(user)
        os.chmod(FOLDER, 0o700)
        for parent, folders, _ in os.walk(FOLDER):
            if parent == FOLDER:
                folders[:] = [name for name in folders if name not in mounted]
            for name in folders:
                path = os.path.join(parent, name)
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
        with os.scandir(FOLDER) as entries:
            for entry in [entry for entry in entries if entry.name not in mounted]:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry)
                else:
                    os.unlink(entry)
        os.seteuid(0)
    except (OSError, RecursionError):
        os._exit(1)


if __name__ == "__main__":
    run_code(*serve_codes(socket.socket(fileno=int(sys.argv[1]))))
