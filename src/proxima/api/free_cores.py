"""The threads of a short command: those for which other processes leave a core.

OpenMP waits at the end of each product for its slowest thread. A thread that shares its core with another process is
that slowest one, so a thread per core beside a busy process is slower than one thread fewer.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

STAT = Path("/proc/stat")  # of Linux
SECONDS = 0.25  # over which the load is measured: 25 ticks of the kernel's clock
SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # environment variables that torch obeys
IDLE, COUNTED = (3, 4), 8  # columns of a core: idle, and idle with a disk pending; those after the eighth repeat others

CoreTimes = Mapping[int, tuple[int, int]]  # by core: ticks without work, and in all, since the machine started


def choose_threads(
    configured: int = 0, read: "Callable[[], CoreTimes] | None" = None, wait: Callable[[float], None] = time.sleep
) -> str | None:
    """Set the number of torch's threads: `configured`, or if 0 one for each free core; at most torch's own number,
    which stays if an environment variable sets it.

    The load is that of the cores that this process may use, measured while it waits. On systems without /proc/stat no
    load is measured.

    Args:
        read, wait: `core_times` and `time.sleep`; tests replace them.

    Returns: a line for the user if the machine is so busy that the number is lowered.
    """
    threads = torch.get_num_threads()
    if configured:
        torch.set_num_threads(min(configured, threads))
        return None
    if threads == 1 or any(os.environ.get(name) for name in SETTINGS):
        return None
    read = read or core_times
    before = read()
    wait(SECONDS)
    passed = [(idle - before[core][0], ticks - before[core][1]) for core, (idle, ticks) in read().items()]
    shares = [idle / ticks for idle, ticks in passed if ticks]
    chosen = min(threads, max(1, round(sum(shares))))
    if not shares or chosen == threads:
        return None
    torch.set_num_threads(chosen)
    free = f"{sum(shares):.1f} of {len(shares)} cores are free"
    return (
        f"other processes keep the machine busy: {free}, so torch uses {chosen} of {threads} threads, which can change "
        f"the last bits of log-probs; OMP_NUM_THREADS={threads} uses all"
    )


def core_times() -> CoreTimes:
    """The counters of the cores that this process may use; empty if the system does not report them."""
    try:
        rows = [line.split() for line in STAT.read_text().splitlines() if line.startswith("cpu")]
        counts = {int(name[3:]): [int(value) for value in values[:COUNTED]] for name, *values in rows if name != "cpu"}
        usable = os.sched_getaffinity(0)
    except (OSError, ValueError, AttributeError):
        return {}
    return {core: (sum(times[i] for i in IDLE), sum(times)) for core, times in counts.items() if core in usable}
