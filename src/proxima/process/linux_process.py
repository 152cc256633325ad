"""What Linux tells about processes and does for them; on other systems it is unknown, or not done.

Standard library only.

`prctl` is in `entry`, which imports nothing of ours. Sandboxes and containers need Linux, and say so.
"""

import os
import select
from contextlib import suppress


def ends_within(pid: int, seconds: float) -> bool | None:
    """Wait at most `seconds` for a child to end, and return whether it has; None: this system can't wait for it."""
    try:
        handle = os.pidfd_open(pid)
    except (AttributeError, OSError):  # another system, or an old kernel
        return None
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1000))
    finally:
        os.close(handle)


def children() -> set[int]:
    """The process ids of the children of this process, zombies included; empty if they are not known."""
    with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children", encoding="utf-8") as file:
        return {int(word) for word in file.read().split()}
    return set()


def prefer_oom_kill() -> None:
    """Make the kernel kill this process, not the run, when the machine runs out of memory."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
        file.write("1000")


def memory_pages(column: int) -> int | None:
    """Pages of memory that this process uses, by the column of `/proc/self/statm`: 0 all of its address space, 5 data
    and stack; None: not known."""
    with suppress(OSError), open("/proc/self/statm", encoding="utf-8") as statm:
        return int(statm.read().split()[column])
    return None
