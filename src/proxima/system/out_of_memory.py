"""Memory that has run out, whichever device and library said so."""

from collections.abc import Iterator
from contextlib import contextmanager


def is_out_of_memory(error: BaseException) -> bool:
    """True for Python's error and for those of torch, of which the one on a CPU has no type of its own."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "can't allocate memory" in str(error)


@contextmanager
def memory_of(work: str) -> Iterator[None]:
    """Name the work in the block in an error about memory.

    Raises:
        MemoryError: memory ran out.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        first, *_ = [*str(error).strip().splitlines(), "an allocation failed"]
        raise MemoryError(f"{work}: {first}") from error
