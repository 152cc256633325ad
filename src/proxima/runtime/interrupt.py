"""Ctrl-C, and quiet around the live view."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from proxima.runtime.controller import Controller


@contextmanager
def stop_on_interrupt(controller: Controller) -> Iterator[None]:
    """The first Ctrl-C asks the loop to end with a checkpoint; the second one is an ordinary KeyboardInterrupt."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        controller.observer.warning(
            "stopping: a checkpoint is written first; press Ctrl-C again to end at once and lose the unfinished step"
        )
        controller.stop()
        loop.remove_signal_handler(signal.SIGINT)

    try:
        loop.add_signal_handler(signal.SIGINT, first)
        loop.add_signal_handler(signal.SIGTERM, controller.stop)
    except (NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread: Ctrl-C is then what it always is
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hugging Face's bars and advice would tear the live view."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    before = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
