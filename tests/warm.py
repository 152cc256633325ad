"""Processes that need not import torch and transformers first: forked from one that has (`tests.warm_server`).

`WarmPopen` is `subprocess.Popen` for `python -m proxima.cli.main …`, `python -c …` and the engine's process. What is
forked is a process like any other: it can be killed at any instant, and nobody else's state is in it. For a test that
is about what a process imports, or about its start, it is the wrong one. Where there is no Linux, it is `Popen`.
"""

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from functools import cache
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = "PROXIMA_WARM_SERVER"  # in the environment of a process that was forked: where its own come from
ROOM = "-" * 4096  # for the words and the variables of what is forked
PACKAGES = tuple(f"packages/proxima-{name}/src" for name in ("peers", "plan", "tinker", "worlds"))
PATH = os.pathsep.join(str(ROOT / name) for name in ("src", *PACKAGES, "."))


@cache
def address() -> str:
    """Of the server, which ends with this process."""
    if ADDRESS in os.environ:
        return os.environ[ADDRESS]
    name = f"proxima-warm-{uuid.uuid4().hex}"
    command = [sys.executable, "-P", str(ROOT / "tests" / "warm_server.py"), name, ROOM]
    quiet = {"PROXIMA_ROOM": ROOM, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch reads the second while it is imported
    single = quiet | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1") | {"TOKENIZERS_PARALLELISM": "false"}
    _SERVERS.append(subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **single, "PYTHONPATH": PATH}))
    return name


_SERVERS: list[Any] = []  # kept open: the server ends when its stdin is closed
CPU_SECONDS = [0.0]  # of the forked processes that have ended, and of those that they waited for


def connected() -> socket.socket:
    channel = socket.socket(socket.AF_UNIX)
    while True:
        try:
            channel.connect("\0" + address())
            return channel
        except ConnectionRefusedError:  # it has only just been started
            assert not _SERVERS or _SERVERS[0].poll() is None, "the server of warm processes has ended"
            time.sleep(0.01)


class _Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A process that the server forks; its parent there says how it ended."""

    def _execute_child(self, args: Any, *facts: Any) -> None:
        assert args[0] == sys.executable
        pass_fds, cwd, env, *_ = facts[3:]
        pipes, session = facts[9:15], facts[20]
        files = [number if given == -1 else given for number, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = {
            "words": args[1:],
            "numbers": [0, 1, 2, *pass_fds],
            "folder": str(cwd or Path.cwd()),
            "environment": {**(os.environ if env is None else env), ADDRESS: address()},
            "session": session,
        }
        body = json.dumps(request).encode()
        self._channel = connected()
        socket.send_fds(self._channel, [len(body).to_bytes(8, "big")], [*files, *pass_fds])
        self._channel.sendall(body)
        self.pid = int.from_bytes(self._channel.recv(8, socket.MSG_WAITALL), "big")
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        try:
            answer = self._channel.recv(16, socket.MSG_DONTWAIT if wait_flags else socket.MSG_WAITALL)
        except BlockingIOError:
            return 0, 0
        self._channel.close()
        CPU_SECONDS[0] += int.from_bytes(answer[8:], "big") / 1e6
        return self.pid, int.from_bytes(answer[:8], "big")

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


WarmPopen = _Forked if sys.platform == "linux" else subprocess.Popen


def run_warm(command: list[str], **options: Any) -> tuple[int, Any, Any]:
    """Exit code, stdout and stderr of a command."""
    with WarmPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        out, err = process.communicate()
    return process.returncode, out, err


LAUNCHER = [sys.executable, "-c", "from tests.warm import torchrun; torchrun()"]  # forks its ranks too


def torchrun() -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import PContext
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = WarmPopen
    PContext.close.__defaults__ = (None, 3)  # seconds until a rank is killed that is stopped when another fails; 30
    run.main()


def forked_subprocess(started: list[Any] | None = None) -> Any:
    """What a module that starts processes of proxima may have in place of `subprocess`: it forks them.

    Args:
        started: gets the processes.
    """

    def start(command: list[str], **options: Any) -> Any:
        if command[1:3] == ["-m", "torch.distributed.run"]:
            command = [*LAUNCHER, *command[3:]]
        light = any(word.startswith("proxima.process.") for word in command[:4])
        process = (subprocess.Popen if light else WarmPopen)(command, **options)
        if started is not None:
            started.append(process)
        return process

    names = {**vars(subprocess), "Popen": start}
    run = FunctionType(subprocess.run.__code__, names)  # which starts by the name `Popen`
    run.__kwdefaults__ = subprocess.run.__kwdefaults__
    return SimpleNamespace(**{**names, "run": run})
