"""A wall clock that jumps while a process runs, for that process alone: its calls of the C library for the time of day
are answered with an offset that a test can change at any moment. Time that only goes forward is left as it is, as on a
machine whose clock is set."""

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *seconds;

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("MOVED_CLOCK"), O_RDONLY);
    void *place = file < 0 ? MAP_FAILED : mmap(NULL, 8, PROT_READ, MAP_SHARED, file, 0);
    seconds = place == MAP_FAILED ? NULL : place;
    if (file >= 0) close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && seconds && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *seconds;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""


class MovedClock:
    """`variables` are those of a process that has this clock."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("cc") is None:
            pytest.skip("no C compiler is installed")
        library, offset = folder / "moved_clock.so", folder / "offset"
        compiled = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), "-x", "c", "-"]
        subprocess.run(compiled, input=SOURCE, text=True, check=True)
        offset.write_bytes(bytes(8))
        with offset.open("r+b") as file:
            self._place = mmap.mmap(file.fileno(), 8)
        self.variables = {"LD_PRELOAD": str(library), "MOVED_CLOCK": str(offset)}

    def move(self, hours: float) -> None:
        """Set it this much later than the machine's."""
        self._place[:] = struct.pack("q", round(hours * 3600))

    def environment(self, **more: str) -> dict[str, str]:
        return os.environ | self.variables | more
