"""Calls that Linux has and other systems lack, each with what is done there instead.

`machine` reads Linux's facts about the machine, `process.linux_process` has what concerns processes. A house rule,
`platform`, keeps such calls out of the rest.
"""

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

SHARED_MEMORY = Path("/dev/shm")  # a file system in memory; no folder elsewhere
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # unique to each boot of a kernel
_THREADS = Path("/proc/self/task")
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_ZEROS = bytes(1 << 20)


def allocate(file: IO[bytes], size: int) -> None:
    """Give an empty file `size` bytes, zeros, and the space for them: what is short is an error here, not a signal when
    the file is mapped. Elsewhere the zeros are written.

    Raises:
        OSError: there is no room.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    for start in range(0, size, len(_ZEROS)):
        file.write(_ZEROS[: size - start])
    file.flush()


def anonymous_memory() -> int:
    """The descriptor of a file in memory without a name; elsewhere of one in the folder for temporary files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("proxima-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def lock(file: int | IO[Any], *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file until it is closed: alone, or with other readers.

    Args:
        wait: for a process that holds it.

    Raises:
        BlockingIOError: another process holds it. OSError: its file system has no locks.
    """
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if not wait:
        how |= fcntl.LOCK_NB
    fcntl.flock(file, how)


def kernel_id() -> bytes:
    """What identifies this kernel since its start; empty elsewhere."""
    with suppress(OSError):
        return _BOOT.read_bytes().strip()
    return b""


def process_start(process: int) -> str | None:
    """When a process started, in ticks since the kernel did; None if there is none. Elsewhere its number stands for it,
    which a later process may get."""
    if not _THREADS.exists():
        return str(process) if _is_process(process) else None
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]  # its name, in brackets, may contain anything


def _is_process(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def core_wait() -> float:
    """Seconds that the present threads of this process could have run and waited for a core, from an arbitrary origin;
    0 elsewhere."""
    nanoseconds = 0
    for thread in _THREADS.glob("*/schedstat"):
        with suppress(OSError, IndexError, ValueError):  # the thread has ended
            nanoseconds += int(thread.read_text(encoding="utf-8").split()[1])
    return nanoseconds / 1e9


def has_nvidia_gpu() -> bool:
    """True if this machine has an NVIDIA GPU, without loading its driver; elsewhere none is used."""
    places = _NVIDIA.glob("*"), Path("/dev").glob("nvidia[0-9]*")
    return any(any(devices) for devices in places)
