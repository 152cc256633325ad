"""uvicorn looks every tenth of a second whether it is to end, and then waits as long again: here, a hundredth of it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch


@contextmanager
def quick_ticks() -> Iterator[None]:
    """Also a decorator."""
    sleep = asyncio.sleep
    quick = SimpleNamespace(**vars(asyncio) | {"sleep": lambda seconds: sleep(seconds / 100)})
    with patch("uvicorn.server.asyncio", quick):
        yield
