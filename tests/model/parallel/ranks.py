"""Runs a function on real processes that talk over gloo."""

import importlib
import os
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ports import kept_socket
from tests.warm import WarmPopen

LIMIT = 240  # seconds, after which the processes are killed
PROGRAM = "import sys; from tests.model.parallel.ranks import rank_of_words; rank_of_words(*sys.argv[1:])"


def run_ranks(function, size: int, folder: Path, codes: list[int] | None = None) -> None:
    """`function(rank, folder)` on `size` new processes; AssertionError with the tracebacks if one fails, or ends with
    another exit code than its one of `codes`, 0 where there are none."""
    socket = kept_socket()
    place = (function.__module__, function.__name__, str(size), str(folder), str(socket.getsockname()[1]))
    ranks = [WarmPopen([sys.executable, "-c", PROGRAM, str(rank), *place]) for rank in range(size)]
    deadline = time.monotonic() + LIMIT
    try:
        for process in ranks:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        hanging = [rank for rank, process in enumerate(ranks) if process.poll() is None]
        for process in ranks:
            process.kill()
            process.wait()
        socket.close()
    errors = [file.read_text() for file in sorted(folder.glob(f"error-{size}-*"))]
    assert not errors, "\n".join(errors)
    assert not hanging, f"ranks {hanging} of {size} hang"
    assert [process.returncode for process in ranks] == (codes or [0] * size)


def rank_of_words(rank: str, module: str, name: str, size: str, folder: str, port: str) -> None:
    """What each of the processes does."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    try:
        timeout = timedelta(seconds=LIMIT)
        store = dist.TCPStore("127.0.0.1", int(port), int(size), rank == "0", timeout=timeout)
        dist.init_process_group(
            "gloo", store=store, rank=int(rank), world_size=int(size), timeout=timedelta(seconds=60)
        )
        getattr(importlib.import_module(module), name)(int(rank), Path(folder))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error-{size}-{rank}").write_text(f"rank {rank} of {size}:\n{traceback.format_exc()}")
        sys.stdout.flush()
        os._exit(1)
