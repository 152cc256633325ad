"""Keep the resident memory of the viewer's processes small. Works with glibc on Linux; does nothing elsewhere."""

import ctypes
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

M_ARENA_MAX, MADV_DONTNEED = -8, 4


class _NoPandas:
    """A finder of modules that finds no pandas."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def without_pandas() -> None:
    """pyarrow does without pandas, which it would load when it first makes an array of numpy: 35 MB."""
    sys.meta_path.insert(0, _NoPandas())


def one_arena() -> None:
    """Threads share the heap, so that what one has freed serves the others. To be called before they begin."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def release_memory() -> None:
    """Return unused memory to the system: free heap, and mapped code that is not running, some 60 MB of torch. Code
    that is called again is mapped again from the page cache in milliseconds. Only executable, read-only file pages are
    released, so that nothing is lost."""
    with suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        libc.malloc_trim(ctypes.c_size_t(0))
        for line in Path("/proc/self/maps").read_text().splitlines():
            place, rights, *_, file = line.split(maxsplit=5)
            if rights == "r-xp" and ".so" in file:
                start, end = (int(edge, 16) for edge in place.split("-"))
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)
