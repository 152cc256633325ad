"""A thread beside the event loop, for work that would block it: updates, log-prob forwards, checkpoints."""

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Progress = Callable[[int, int], None]


class WorkerThread:
    """Runs calls beside the event loop, with as many torch threads as the thread that made it has.

    Each call gets a fresh thread: the OpenMP threads of an idle one would slow down decoding in the main thread.
    A call runs to its end. Only if the task that awaits it is cancelled (a second Ctrl-C), the call gets a
    KeyboardInterrupt at its next line of Python.
    """

    def __init__(self) -> None:
        self._torch_threads = torch.get_num_threads()
        self._executor: ThreadPoolExecutor | None = None
        self._ident = 0

    def _start(self) -> None:
        self._ident = threading.get_ident()
        torch.set_num_threads(self._torch_threads)  # OpenMP keeps this number for each thread

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """What `call(*arguments)` returns or raises. One call at a time."""
        self._executor = ThreadPoolExecutor(1, "proxima-worker", self._start)
        future = self._executor.submit(call, *arguments)
        self._executor.shutdown(wait=False)  # the thread ends with the call
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._interrupt(future)
            raise

    async def run_with_progress(self, call: Callable[[Progress], T], report: Progress) -> T:
        """What `call(progress)` returns or raises; each `progress(done, total)` becomes a `report` on the event loop.

        A report that raises does not stop the call; its exception is raised when the call has ended.
        """
        loop, errors = asyncio.get_running_loop(), list[BaseException]()

        def on_loop(done: int, total: int) -> None:
            try:
                report(done, total)
            except BaseException as error:  # the event loop would only log it
                errors.append(error)

        def progress(done: int, total: int) -> None:
            loop.call_soon_threadsafe(on_loop, done, total)

        result = await self.run(call, progress)
        if errors:
            raise errors[0]
        return result

    def __enter__(self) -> "WorkerThread":
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the end of a call that was interrupted."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)

    def _interrupt(self, future: "Future[Any]") -> None:
        if future.running():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._ident), ctypes.py_object(KeyboardInterrupt))
