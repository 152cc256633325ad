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
import tempfile
import threading
import time
from contextlib import suppress

from proxima.environment.protocol import Reply

CHILDREN, FOREVER = 20, 6000
SHORT = 0.1  # seconds for calls that never end
DONE = "done"  # the episode ends with its reward
TIME = f"timed out after {SHORT:g} s"
CHANGED = "it changed its class Hostile"
NONSENSE = "expected a text, messages or a Reply"


def forks(children, seconds):
    for _ in range(children):
        if os.fork() == 0:
            time.sleep(FOREVER)
            os._exit(0)
    time.sleep(seconds)


def forks_and_returns():
    os.fork()


def writes_to_all_files():
    for fd in range(3, 64):
        with suppress(OSError):
            os.write(fd, b'{"id": 1}\n')


def circular():
    inside = [USER]
    inside.append(inside)
    return inside


def deletes_its_module():
    for name in [name for name in sys.modules if name.endswith("hostile")]:
        del sys.modules[name]


def changes_directory():
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    shutil.rmtree(folder)


def breaks_json():
    json.dumps = None


def recursion():
    return recursion()


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


def opens_too_many_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    while True:
        os.open(os.devnull, os.O_RDONLY)


def takes_builtins():
    builtins.len = None


def becomes_a_daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(FOREVER)
        os._exit(0)


async def async_generator():
    yield "a"


async def cancels_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(1)


async def stops_the_loop():
    asyncio.get_running_loop().stop()
    await asyncio.sleep(FOREVER)


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
        time.sleep(FOREVER)


USER = {"role": "user", "content": "x"}
REWARD, IS_TEXT = "Reply.reward of respond", "of respond is a value of type str"
RESPOND = {
    "good": (lambda: "yes", DONE),
    "raises": (lambda: raises(OSError("no disk")), r"OSError: no disk \(hostile.py:\d+\)"),
    "interrupt": (lambda: raises(KeyboardInterrupt()), "KeyboardInterrupt"),
    "hangs": (lambda: time.sleep(FOREVER), TIME),
    "spins in C": (lambda: re.match(r"(?:a+)+$", "a" * 40 + "!"), TIME),
    "async hang": (lambda: asyncio.sleep(FOREVER), TIME),
    "forks": (lambda: forks(1, 0), f"respond returned None, {NONSENSE}"),
    "forks and returns": (forks_and_returns, f"respond returned None, {NONSENSE}"),
    "many forks": (lambda: forks(CHILDREN, FOREVER), TIME),
    "sys.exit": (lambda: sys.exit(0), "SystemExit: 0"),
    "segfault": (lambda: ctypes.string_at(0), r"its worker died \(SIGSEGV\)"),
    "kills itself": (lambda: os.kill(os.getpid(), signal.SIGKILL), r"its worker died \(SIGKILL\)"),
    "prints": (lambda: [print("x" * 1000) for _ in range(2000)] and "printed", DONE),
    "prints to files": (lambda: [os.write(fd, b"x" * 65536) for fd in (1, 2) for _ in range(100)] and "printed", DONE),
    "writes to all files": (writes_to_all_files, "something wrote into its worker's socket"),
    "closes all files": (lambda: os.closerange(3, 256), "its worker (ended|died)"),
    "closes input": (lambda: os.close(0) or "closed", DONE),
    "closes output": (lambda: sys.stdout.close() or "closed", DONE),
    "eats memory": (lambda: [bytes(1 << 24) for _ in range(1000)] and "eaten", "MemoryError: above the worker's limit"),
    "recursion": (recursion, "RecursionError"),
    "breaks json": (breaks_json, "its worker ended"),
    "changes directory": (lambda: changes_directory() or "gone", DONE),
    "deletes its module": (lambda: deletes_its_module() or "deleted", DONE),
    "stops collecting": (lambda: gc.disable() or "stopped", DONE),
    "None": (lambda: None, f"respond returned None, {NONSENSE}"),
    "object": (object, f"respond returned a value of type object, {NONSENSE}"),
    "circular": (circular, "respond returned a value of type list, expected a list of messages"),
    "dict": (lambda: USER, f"respond returned a value of type dict, {NONSENSE}"),
    "long text": (lambda: "x" * 30_000_000, "returned a text of 30,000,000 characters; at most 1,048,576 are allowed"),
    "surrogate": (lambda: "half \ud83d", "respond returned a text with a lone surrogate"),
    "no messages": (lambda: [{"text": "x"}], "returned a message with the keys text, expected role and content"),
    "image": (lambda: [USER | {"content": [{"type": "image"}]}], "returned a value of type list, expected a text"),
    "wrong role": (lambda: [USER | {"role": "assistant"}], "role 'assistant', expected user, tool, system"),
    "done is a text": (lambda: Reply(content="x", done="false"), f"done {IS_TEXT}, expected True or False"),
    "reward is a text": (lambda: Reply(content="x", reward="1"), f"reward {IS_TEXT}, expected a number"),
    "reward is NaN": (lambda: Reply(content="x", reward=float("nan")), f"{REWARD} is nan, expected a finite number"),
    "exits well": (lambda: os._exit(0), "its worker ended"),
    "prints forever": (lambda: prints_forever() or "printing", DONE),
    "changes the process": (lambda: changes_process() or "changed", DONE),
    "limits itself": (lambda: limits_itself() or "limited", DONE),
    "opens too many files": (opens_too_many_files, "it left its worker without files to open"),
    "lowers the recursion limit": (lambda: sys.setrecursionlimit(40) or "lowered", DONE),
    "takes builtins": (lambda: takes_builtins() or "taken", "'NoneType' object is not callable"),
    "takes sys.stdout": (lambda: vars(sys).update(stdout=None, stderr=3) or "taken", DONE),
    "becomes a daemon": (lambda: becomes_a_daemon() or "forked", DONE),
    "async generator": (async_generator, f"respond returned a value of type async_generator, {NONSENSE}"),
    "cancels itself": (cancels_itself, "CancelledError"),
    "stops the loop": (stops_the_loop, "RuntimeError: Event loop stopped"),
    "StopIteration": (lambda: raises(StopIteration()), "StopIteration"),
    "raises a surrogate": (lambda: raises(OSError("half \ud83d")), r"OSError: half"),
    "raises much": (lambda: raises(type("E" * 100_000, (Exception,), {})("x" * 1_000_000)), "^E{50}"),
    "raises notes": (lambda: raises(noted()), r"OSError: noted"),
    "raises what has no text": (lambda: raises(Unprintable()), "its worker ended"),
    "surrogate key": (lambda: [{"half \ud83d": 1}], "respond returned a message with the keys half"),
    "reward is a scalar": (lambda: Reply(content="x", reward=Number([0.0])), DONE),
    "reward is an array": (
        lambda: Reply(content="x", reward=Number([0.0, 1.0])),
        f"{REWARD} is a value of type Number, expected a number",
    ),
    "state is a number": (lambda: Reply(content="x", state=3), "Reply.state of .* of type int, expected a text"),
}
RESET = {
    "reset raises": (lambda: raises(ValueError("no")), r"ValueError: no \(hostile.py:\d+\)"),
    "reset hangs": (lambda: time.sleep(FOREVER), TIME),
    "reset returns a number": (lambda: 3, f"reset returned a value of type int, {NONSENSE}"),
    "reset returns nothing": (list, "reset returned no prompt, and the row has none"),
    "freeing hangs": (lambda: None, TIME),
}
END = {
    "end raises": (lambda: raises(ZeroDivisionError("no")), "ZeroDivisionError: no"),
    "end hangs": (lambda: time.sleep(FOREVER), TIME),
    "end is None": (lambda: None, "get_reward is None, expected a number"),
    "end exits": (lambda: os._exit(0), "its worker ended"),
}


class Other:
    """Has nothing that an environment has."""


CLASS = {
    "becomes another class": (lambda environment: setattr(environment, "__class__", Other), CHANGED),
    "takes a method of its class": (lambda environment: setattr(Hostile, "respond", None), CHANGED),
    "removes a method of its class": (lambda environment: delattr(Hostile, "get_reward"), CHANGED),
}


class Hostile:
    def reset(self, kind, **columns):
        self.kind = kind
        self.circle = Circle() if kind == "freeing hangs" else None
        return RESET[kind][0]() if kind in RESET else None

    def respond(self, text):
        if self.kind in CLASS:
            CLASS[self.kind][0](self)
        return RESPOND.get(self.kind, RESPOND["good"])[0]()

    def get_reward(self):
        return END[self.kind][0]() if self.kind in END else 1.0
