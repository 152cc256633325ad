"""The worker program that plays episodes with a Python function, and the protocol of all such programs, `serve_jobs`.

    python agent_process.py module:function

Lines of JSON on stdin are jobs, `{"id", "row", "base_url", "api_key", "model"}`, and `{"cancel": id, "seconds"}` for
one that is late. The first line on stdout is `{"ready": true}`; then come the outcomes, `{"id", "reward"}` or
`{"id", "error"}`. A job that is cancelled is answered by `{"id", "stopping": true}` from the event loop, and by an
outcome once it has ended. If the loop does not come to that within `seconds`, `{"held_by": id}` names the job that
keeps it busy, or null. What a job prints goes to stderr. Imports only the standard library.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import importlib
import inspect
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener
from weakref import WeakKeyDictionary

LINE_BYTES = 1 << 24  # of a message at most, as `program` reads it
ASKED = ("row", "base_url", "api_key", "model", "set_reward")
Job = dict[str, Any]
Write = Callable[[Mapping[str, Any]], None]

episode: contextvars.ContextVar[int | None] = contextvars.ContextVar("episode", default=None)
"""The id of the job that a task, and what it has started, belongs to."""


class Cancelled(BaseException):
    """Raised in the thread of a function that takes too long."""


class Jobs:
    """The jobs of this process, in one event loop.

    Args:
        play: plays a job and returns its outcome.
        write: sends a message.
    """

    def __init__(self, play: Callable[[Job], Awaitable[Mapping[str, Any]]], write: Write) -> None:
        self.play = play
        self._write = write
        self.loop = asyncio.get_running_loop()
        self.loop.set_task_factory(self._task)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._owners: WeakKeyDictionary[Any, int | None] = WeakKeyDictionary()  # of all tasks
        self._writing = threading.Lock()

    def write(self, message: Mapping[str, Any]) -> None:
        """Send a message, from any thread."""
        with self._writing:
            self._write(message)

    def read(self) -> None:
        """Do what stdin says until it ends, then exit at once, even if jobs are still running."""
        for line in sys.stdin:
            message = json.loads(line)
            if "cancel" in message:
                self._cancel_soon(message["cancel"], message["seconds"])
            else:
                self.loop.call_soon_threadsafe(self._start, message)
        os._exit(0)  # the run has ended, cleanly or not

    def _start(self, job: Job) -> None:
        context = contextvars.copy_context()
        context.run(episode.set, job["id"])
        self._tasks[job["id"]] = context.run(self.loop.create_task, self._work(job))

    async def _work(self, job: Job) -> None:
        try:
            answer = await self.play(job)
            size = len(json.dumps({"id": job["id"], **answer})) + 1  # that of JSON in ASCII is in bytes
            if size > LINE_BYTES:  # it would end the process, and the other jobs
                raise ValueError(f"its answer has {size:,} bytes of JSON, at most {LINE_BYTES:,} are read")
        except asyncio.CancelledError:
            answer = {"error": "it was cancelled"}
        except (Exception, SystemExit) as error:  # an exit would end the others, too
            answer = {"error": error_line(error)}
        del self._tasks[job["id"]]
        self.write({"id": job["id"], **answer})

    def _cancel_soon(self, number: int, seconds: float) -> None:
        """Cancel a job in the event loop, and say so if that takes longer."""
        alive = threading.Event()

        def cancel() -> None:
            alive.set()
            if number in self._tasks:  # else it has just ended
                self.write({"id": number, "stopping": True})
                self.loop.call_soon(self._tasks[number].cancel)  # one that never began could not say that it ended

        def watch() -> None:
            if not alive.wait(seconds):
                current = asyncio.current_task(self.loop)
                owner = None if current is None else self._owners.get(current)
                self.write({"held_by": owner})

        self.loop.call_soon_threadsafe(cancel)
        threading.Thread(target=watch, daemon=True).start()

    def _task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
        """Make a task whose job is known."""
        task = asyncio.Task(work, loop=loop, **options)
        context = options.get("context")
        self._owners[task] = episode.get() if context is None else context.get(episode)
        return task


async def serve_jobs(
    play: Callable[[Job], Awaitable[Mapping[str, Any]]], write: Write, serving: AbstractAsyncContextManager[Any]
) -> None:
    """Play the jobs that stdin gives, within `serving`; see `Jobs`. Does not return."""
    async with serving:
        jobs = Jobs(play, write)
        jobs.write({"ready": True})
        threading.Thread(target=jobs.read, daemon=True).start()
        await asyncio.Event().wait()


async def in_thread(function: Callable[[], Any]) -> Any:
    """What a function returns, in a thread of its own; if this is cancelled, `Cancelled` is raised in the thread. What
    ignores that, such as a long call of C, keeps its thread, and this does not end."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def tell(result: Any, error: BaseException | None) -> None:
        if ended.done():
            return
        if error is None:
            ended.set_result(result)
        else:
            ended.set_exception(error)

    def run() -> None:
        result: Any = None
        failure: Exception | None = None
        try:
            result = function()
        except Cancelled:
            failure = RuntimeError("it was cancelled")
        except Exception as error:
            failure = error
        except SystemExit as error:
            failure = RuntimeError(error_line(error))
        loop.call_soon_threadsafe(tell, result, failure)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    thread.start()
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        if thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Cancelled))
        with contextlib.suppress(Exception):
            await ended
        raise


def error_line(error: BaseException) -> str:
    """Return an exception as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")[:300]


def main(reference: str) -> None:
    """Run jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # the function may print
    sys.stdout = os.fdopen(1, "w", closefd=False, encoding="utf-8", errors="backslashreplace", buffering=1)
    module, _, name = reference.partition(":")
    here = os.path.dirname(os.path.abspath(__file__))  # its `agents.py` would hide the OpenAI Agents SDK
    sys.path[:] = [os.getcwd(), *(path for path in sys.path if os.path.abspath(path) != here)]
    function = getattr(importlib.import_module(module), name)

    def write(message: Mapping[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    async def play(job: Job) -> Mapping[str, Any]:
        return await _played(function, job)

    asyncio.run(serve_jobs(play, write, _nothing()))


@contextlib.asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


class JobRow(dict[str, Any]):
    """The row of an episode; a column that it lacks is a KeyError that lists those it has."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"{name}; the row has {', '.join(self)}")


class SetReward:
    """Gives an answer of the policy a reward: `set_reward(completion.id, 0.5)`, once the answer is known and before the
    episode ends; the second reward of an answer replaces the first.

    Args:
        job: that of the episode.
    """

    def __init__(self, job: Job) -> None:
        self._url = f"{job['base_url']}/rewards"
        self._key = job["api_key"]

    def __call__(self, answer: str, reward: float, index: int = 0) -> None:
        """Give the reward.

        Args:
            answer: the id of the answer.
            reward: in reward units.
            index: the choice, of an answer with several.
        Raises: ValueError, with the endpoint's reason.
        """
        body = json.dumps({"id": answer, "reward": reward, "index": index}).encode()
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        try:
            with build_opener(ProxyHandler({})).open(Request(self._url, body, headers)) as response:
                response.read()
        except HTTPError as error:
            raise ValueError(json.load(error)["error"]["message"]) from None

    async def in_coroutine(self, answer: str, reward: float, index: int = 0) -> None:
        """As a call, while other episodes go on."""
        await in_thread(lambda: self(answer, reward, index))


async def _played(function: Callable[..., Any], job: Job) -> Mapping[str, Any]:
    is_coroutine = inspect.iscoroutinefunction(function)
    job["row"] = JobRow(job["row"])
    set_reward = SetReward(job)
    job["set_reward"] = set_reward.in_coroutine if is_coroutine else set_reward
    arguments = {name: job[name] for name in inspect.signature(function).parameters if name in ASKED}
    if is_coroutine:
        reward = await function(**arguments)
    else:
        reward = await in_thread(lambda: function(**arguments))
    if isinstance(reward, Mapping):  # of each role
        return {"reward": {str(name): float(value) for name, value in reward.items()}}
    if reward is None:
        return {"reward": None}
    return {"reward": float(reward)}


if __name__ == "__main__":
    main(sys.argv[1])
