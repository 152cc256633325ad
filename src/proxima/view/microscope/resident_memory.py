"""Keeps the viewer's processes from holding unused memory. Works with glibc on Linux; elsewhere it does nothing."""

import ctypes
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

M_ARENA_MAX, MADV_DONTNEED = -8, 4


class _NoPandas:
    """A module finder that hides pandas."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def without_pandas() -> None:
    """Keep pyarrow from importing pandas, 35 MB, when it first creates an array from numpy."""
    sys.meta_path.insert(0, _NoPandas())


def one_arena() -> None:
    """Make all threads share one heap, to reuse each other's freed memory. Call it before starting threads."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def release_memory() -> None:
    """Return unused memory to the system: free heap, and mapped code pages, some 60 MB for torch. Code that is called
    again is mapped again from the page cache, in milliseconds. Only executable, read-only pages of files are dropped,
    so that nothing is lost."""
    with suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        libc.malloc_trim(ctypes.c_size_t(0))
        for line in Path("/proc/self/maps").read_text().splitlines():
            place, rights, *_, file = line.split(maxsplit=5)
            if rights == "r-xp" and ".so" in file:
                start, end = (int(edge, 16) for edge in place.split("-"))
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)
