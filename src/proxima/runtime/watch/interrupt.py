"""Ctrl-C."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from proxima.model.compute_thread import ComputeThread

Handler = Callable[[int, FrameType | None], object]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DEATH_SECONDS = 0.5  # in which the death of another process is noticed, for which a launcher may end this one


@contextmanager
def signals_restored() -> Iterator[None]:
    """Restore the handlers of `SIGNALS` on exit. Does nothing outside the main thread, which alone may."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def signals_handled(handler: Handler, numbers: Iterable[signal.Signals] = SIGNALS) -> Iterator[None]:
    """Within the block, the signals call a handler; see `handle_signals`."""
    with signals_restored():
        handle_signals(handler, numbers)
        yield


def handle_signals(handler: Handler, numbers: Iterable[signal.Signals] = SIGNALS) -> None:
    """Let the signals call a handler, except a SIGHUP that `nohup` has switched off. Does nothing outside the main
    thread, which alone may."""
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)


def stop_on_interrupt(
    ask_to_stop: Callable[[], bool],
    warn: Callable[[str], None],
    compute: ComputeThread,
    lost: Callable[[], bool] | None = None,
) -> None:
    """The first Ctrl-C, SIGTERM or SIGHUP asks the loop to stop with a checkpoint, the second is a KeyboardInterrupt.

    Python runs signal handlers in the main thread, which is the compute thread: the second Ctrl-C ends its call.

    Args:
        ask_to_stop: returns whether a step is finished; before that there is nothing for a checkpoint.
        lost: of several processes, whether one has died; then a launcher ends all with SIGTERM, and who watches them
            ends this one. None: there is one process.
    """
    events = asyncio.get_running_loop()
    seen: list[int] = []

    def stop() -> None:
        if len(seen) > 1:  # the second one came first: the run has ended already
            return
        if lost is not None and lost():
            seen.clear()
            return
        if seen[0] == signal.SIGINT:
            again = "press Ctrl-C again"
        else:
            again = f"send {signal.Signals(seen[0]).name} again"
        if ask_to_stop():
            saved = "a checkpoint is written first"
        else:
            saved = "there is a checkpoint only if step 1 can end"
        warn(f"stopping: {saved}; {again} to quit now and lose what came after the last checkpoint")

    def handle(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise KeyboardInterrupt
        if lost is not None and number != signal.SIGINT:
            events.call_soon_threadsafe(events.call_later, DEATH_SECONDS, stop)
        else:
            events.call_soon_threadsafe(stop)

    compute.call(handle_signals, handle)
