"""An environment that misbehaves in the way that its row names."""

import asyncio
import builtins
import ctypes
import gc
import json
import locale
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress

from proxima.environment import Reply


def forks(children, seconds):
    for _ in range(children):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    time.sleep(seconds)


def forks_and_returns():
    os.fork()


def writes_to_all_files():
    for fd in range(3, 64):
        with suppress(OSError):
            os.write(fd, b'{"id": 1}\n')


def circular():
    inside = [{"role": "user", "content": "x"}]
    inside.append(inside)
    return inside


def deletes_its_module():
    for name in [name for name in sys.modules if name.endswith("hostile")]:
        del sys.modules[name]


def changes_directory():
    folder = f"/tmp/proxima-hostile-{os.getpid()}"
    os.mkdir(folder)
    os.chdir(folder)
    shutil.rmtree(folder)


def breaks_json():
    json.dumps = None


def recursion():
    return recursion()


def leaves_threads():
    for _ in range(8):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def spins():
    while True:
        pass


def raises(error):
    raise error


def prints_forever():
    def run():
        while True:
            print("x" * 100)

    for _ in range(2):
        threading.Thread(target=run, daemon=True).start()


def changes_process():
    """What all environments of a worker share."""
    os.umask(0o777)
    locale.setlocale(locale.LC_ALL, "C")
    os.environ.clear()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    sys.path.clear()


def limits_itself():
    for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
        resource.setrlimit(kind, (0, 0))


def opens_no_file():
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def takes_builtins():
    builtins.len = None


def becomes_a_daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)


async def async_generator():
    yield "a"


async def cancels_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(1)


async def stops_the_loop():
    asyncio.get_running_loop().stop()
    await asyncio.sleep(60)


def noted():
    error = OSError("noted")
    error.add_note("x\n" * 100_000)
    return error


class Unprintable(Exception):
    def __str__(self):
        raise OSError("no text")


class Number:
    """As a scalar of numpy or torch."""

    def __init__(self, values):
        self.values = values

    def __float__(self):
        (value,) = self.values
        return value


class Circle:
    """Freeing it takes forever."""

    def __del__(self):
        time.sleep(60)


RESPOND = {
    "good": lambda: "yes",
    "raises": lambda: raises(OSError("no disk")),
    "interrupt": lambda: raises(KeyboardInterrupt()),
    "base": lambda: raises(BaseException("all")),
    "hangs": lambda: time.sleep(60),
    "spins": spins,
    "spins in C": lambda: re.match(r"(?:a+)+$", "a" * 40 + "!"),
    "async hang": lambda: asyncio.sleep(60),
    "forks": lambda: forks(1, 0),
    "forks and returns": forks_and_returns,
    "many forks": lambda: forks(100, 60),
    "exits": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(0),
    "segfault": lambda: ctypes.string_at(0),
    "kills itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "alarm": lambda: [signal.setitimer(signal.ITIMER_REAL, 0.01), time.sleep(60)],
    "prints": lambda: [print("x" * 1000) for _ in range(20_000)] and "printed",
    "prints to files": lambda: [os.write(fd, b"x" * 65536) for fd in (1, 2) for _ in range(100)] and "printed",
    "writes to all files": writes_to_all_files,
    "closes all files": lambda: os.closerange(3, 256),
    "closes input": lambda: os.close(0) or "closed",
    "closes output": lambda: sys.stdout.close() or "closed",
    "eats memory": lambda: [bytearray(1 << 24) for _ in range(1000)] and "eaten",
    "recursion": recursion,
    "breaks json": breaks_json,
    "changes directory": lambda: changes_directory() or "gone",
    "leaves threads": lambda: leaves_threads() or "left",
    "deletes its module": lambda: deletes_its_module() or "deleted",
    "stops collecting": lambda: gc.disable() or "stopped",
    "None": lambda: None,
    "number": lambda: float("nan"),
    "object": object,
    "bytes": lambda: b"bytes",
    "generator": lambda: (x for x in "ab"),
    "circular": circular,
    "dict": lambda: {"role": "user", "content": "x"},
    "long text": lambda: "x" * 30_000_000,
    "surrogate": lambda: "half \ud83d",
    "no messages": lambda: [{"text": "x"}],
    "image": lambda: [{"role": "user", "content": [{"type": "image"}]}],
    "wrong role": lambda: [{"role": "assistant", "content": "I win"}],
    "done is a text": lambda: Reply(content="x", done="false"),
    "reward is a text": lambda: Reply(content="x", reward="1"),
    "reward is NaN": lambda: Reply(content="x", reward=float("nan")),
    "reward is infinite": lambda: Reply(content="x", reward=float("inf")),
    "exits well": lambda: os._exit(0),
    "prints forever": lambda: prints_forever() or "printing",
    "changes the process": lambda: changes_process() or "changed",
    "limits itself": lambda: limits_itself() or "limited",
    "opens no file": lambda: opens_no_file() or "closed",
    "opens too many files": lambda: [os.open(os.devnull, os.O_RDONLY) for _ in range(1 << 20)] and "opened",
    "lowers the recursion limit": lambda: sys.setrecursionlimit(40) or "lowered",
    "takes builtins": lambda: takes_builtins() or "taken",
    "takes sys.stdout": lambda: vars(sys).update(stdout=None, stderr=3) or "taken",
    "becomes a daemon": lambda: becomes_a_daemon() or "forked",
    "async generator": async_generator,
    "cancels itself": cancels_itself,
    "stops the loop": stops_the_loop,
    "StopIteration": lambda: raises(StopIteration()),
    "raises a surrogate": lambda: raises(OSError("half \ud83d")),
    "raises much": lambda: raises(type("E" * 100_000, (Exception,), {})("x" * 1_000_000)),
    "raises notes": lambda: raises(noted()),
    "raises what has no text": lambda: raises(Unprintable()),
    "surrogate key": lambda: [{"half \ud83d": 1}],
    "reward is a scalar": lambda: Reply(content="x", reward=Number([0.0])),
    "reward is an array": lambda: Reply(content="x", reward=Number([0.0, 1.0])),
    "state is a number": lambda: Reply(content="x", state=3),
}
RESET = {
    "reset raises": lambda: raises(ValueError("no")),
    "reset hangs": lambda: time.sleep(60),
    "reset returns a number": lambda: 3,
    "reset returns nothing": list,
}
END = {
    "end raises": lambda: raises(ZeroDivisionError("no")),
    "end hangs": lambda: time.sleep(60),
    "end is None": lambda: None,
    "end is NaN": lambda: float("nan"),
    "end is a text": lambda: "1",
    "end exits": lambda: os._exit(0),
}


class Other:
    """Has nothing that an environment has."""


CLASS = {
    "becomes another class": lambda environment: setattr(environment, "__class__", Other),
    "takes a method of its class": lambda environment: setattr(Hostile, "respond", None),
    "removes a method of its class": lambda environment: delattr(Hostile, "get_reward"),
}


class Hostile:
    def reset(self, kind, **columns):
        self.kind = kind
        self.circle = Circle() if kind == "freeing hangs" else None
        return RESET[kind]() if kind in RESET else None

    def respond(self, text):
        if self.kind in CLASS:
            CLASS[self.kind](self)
        return RESPOND.get(self.kind, RESPOND["good"])()

    def get_reward(self):
        return END[self.kind]() if self.kind in END else 1.0
