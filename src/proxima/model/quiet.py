"""Silence around the lines of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the progress bars and advice of transformers, which would break the progress of a stage."""
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
