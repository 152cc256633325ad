"""The process that `tests.warm` forks from: it has imported what a run imports, and has computed nothing.

Each request is a connection: JSON with the words of a `python` command, and its open files. What is forked runs the
command and ends as an interpreter does. Its parent, forked too, reports its id and then its exit status.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

MODULES = (
    "peft",
    "proxima.cli.main",
    "proxima.cli.train",
    "proxima.engine.process.served_engine",
    "proxima.runtime.launch.offline_workload",
    "proxima.runtime.launch.rl_workload",
    "proxima.runtime.launch.run",
    "tests.model.parallel.splits",
    "tests.runtime.offline.tiny_dpo",
    "tests.runtime.offline.tiny_reward",
    "tests.runtime.offline.tiny_sft",
    "tests.training.shared_updates",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
)
ABOVE = 500  # no descriptor of a request has such a number


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request, and the descriptors that came with it."""
    head, files, _, _ = socket.recv_fds(channel, 8, 64)
    rest, parts = int.from_bytes(head, "big"), []
    while rest:
        parts.append(channel.recv(rest))
        rest -= len(parts[-1])
    return json.loads(b"".join(parts)), files


def become(request: dict[str, Any], files: list[int]) -> None:
    """Make this process the one that the request describes, but for its program."""
    if request["session"]:
        os.setsid()
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, ABOVE) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(apart, request["numbers"], strict=True):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    show([sys.executable, *request["words"]], [f"{name}={value}" for name, value in request["environment"].items()])
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    random.seed()


def show(words: Iterable[str], variables: Iterable[str]) -> None:
    """Write command line and environment where /proc has them, in the room that `tests.warm` left for them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    for texts, begin, end in ((words, *map(int, fields[45:47])), (variables, *map(int, fields[47:49]))):
        body = b"".join(os.fsencode(text) + b"\0" for text in texts)
        ctypes.memmove(begin, body[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


def run(words: list[str]) -> None:
    """What `python WORDS` does."""
    words = words[words[0] == "-u" :]
    safe, (place, *rest) = words[0] == "-P", words[words[0] == "-P" :]
    name = rest.pop(0) if place in ("-c", "-m") else place
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [entry for entry in (*([] if safe else [os.getcwd()]), *path) if entry and entry not in sys.path]
    sys.argv = [place, *rest]
    if place == "-c":
        exec(compile(name, "<string>", "exec"), sys.modules["__main__"].__dict__)
    elif place == "-m":
        sys.modules.pop(name, None)  # it runs anew, as the main module
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.modules.pop(rest[0], None)  # of entry.py, which runs it as the main module
        runpy.run_path(name, run_name="__main__")


def end(words: list[str]) -> NoReturn:
    """Run the command and end, as an interpreter does but for taking a million objects apart."""
    code: Any = 0
    try:
        run(words)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def serve(listening: socket.socket) -> list[str]:
    """Fork for every request, until stdin is closed; returns in what is forked, with its words."""
    while True:
        if sys.stdin in select.select([listening, sys.stdin], [], [])[0]:
            os._exit(0)
        channel, _ = listening.accept()
        request, files = receive(channel)
        if os.fork():
            channel.close()
            for file in files:
                os.close(file)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listening.close()
        if not (pid := os.fork()):
            channel.close()
            become(request, files)
            return list(request["words"])
        for file in (*files, *range(3)):
            os.close(file)
        channel.sendall(pid.to_bytes(8, "big"))
        _, status, used = os.wait4(pid, 0)
        microseconds = round(1e6 * (used.ru_utime + used.ru_stime))
        channel.sendall(status.to_bytes(8, "big") + microseconds.to_bytes(8, "big"))
        os._exit(0)


if __name__ == "__main__":
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("\0" + sys.argv[1])
    listening.listen(64)
    for module in MODULES:
        importlib.import_module(module)
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")  # a table
    if sys.stdin.closed:
        os._exit(0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the parents of what is forked need nobody to wait for them
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    end(serve(listening))
