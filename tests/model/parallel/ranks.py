"""Runs a function on real processes that talk over gloo."""

import importlib
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tests.ports import kept_socket

LIMIT = 240  # seconds, after which the processes are killed


def run_ranks(function, size: int, folder: Path, codes: list[int] | None = None) -> None:
    """`function(rank, folder)` on `size` new processes; AssertionError with the tracebacks if one fails, or ends with
    another exit code than its one of `codes`, 0 where there are none."""
    socket = kept_socket()
    context = multiprocessing.get_context("spawn")
    place = (function.__module__, function.__name__, size, folder, socket.getsockname()[1])
    ranks = [context.Process(target=_rank, args=(rank, *place), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(LIMIT)
    finally:
        hanging = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
        socket.close()
    errors = [file.read_text() for file in sorted(folder.glob(f"error-{size}-*"))]
    assert not errors, "\n".join(errors)
    assert not hanging, f"ranks {hanging} of {size} hang"
    assert [process.exitcode for process in ranks] == (codes or [0] * size)


def _rank(rank: int, module: str, name: str, size: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=timedelta(seconds=LIMIT))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        getattr(importlib.import_module(module), name)(rank, folder)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error-{size}-{rank}").write_text(f"rank {rank} of {size}:\n{traceback.format_exc()}")
        sys.stdout.flush()
        os._exit(1)
