"""Runs functions on real processes that talk over gloo.

Groups of 2 and of 4 live as long as the test process and run function after function: what a process does once, from
importing to remembering how an operation is split, is done once.
"""

import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from proxima.model.parallel import mesh
from tests import warm
from tests.ports import kept_socket

LIMIT = 600  # seconds, after which the processes are killed
PROGRAM = "import sys; from tests.model.parallel.ranks import rank_of_words; rank_of_words(*sys.argv[1:])"
KEPT = {2, 4}
GROUPS: dict[int, "Group"] = {}  # by size, those that wait for a function


def run_ranks(
    function: Callable[..., None], size: int, folder: Path, *arguments: Any, codes: list[int] | None = None
) -> None:
    """`function(rank, folder, *arguments)` on `size` processes; AssertionError with the tracebacks if one fails.

    Args:
        codes: the exit codes of processes that the function ends, which are new ones.
    """
    kept = size in KEPT and codes is None
    group = (GROUPS.pop(size, None) if kept else None) or Group(size)
    try:
        errors, silent = group.run(function, folder, *arguments)
        assert not errors, "\n".join(errors)
        if codes is not None:
            assert [process.wait(LIMIT) for process in group.ranks] == codes
        else:
            assert not silent, f"ranks {silent} of {size} ended or hang"
        if kept:
            GROUPS[size] = group
    finally:
        if GROUPS.get(size) is not group:
            group.end()


class Group:
    """Processes that share a process group of torch.distributed."""

    def __init__(self, size: int) -> None:
        self.size, self.socket = size, kept_socket()
        self.channels: list[Connection] = []
        self.ranks: list[Any] = []
        for rank in range(size):
            ours, theirs = Pipe()
            place = map(str, (rank, size, self.socket.getsockname()[1], theirs.fileno()))
            self.ranks.append(warm.WarmPopen([sys.executable, "-c", PROGRAM, *place], pass_fds=[theirs.fileno()]))
            theirs.close()
            self.channels.append(ours)

    def run(self, function: Callable[..., None], *arguments: Any) -> tuple[list[str], list[int]]:
        """The tracebacks of the ranks that failed, and those that did not answer."""
        for channel in self.channels:
            channel.send((function.__module__, function.__name__, arguments))
        deadline, errors, silent = time.monotonic() + LIMIT, [], []
        for rank, channel in enumerate(self.channels):
            try:
                if not channel.poll(max(0.0, deadline - time.monotonic())):
                    raise EOFError
                error, seconds = channel.recv()
            except (EOFError, ConnectionResetError):
                silent.append(rank)
                continue
            warm.CPU_SECONDS[0] += seconds
            if error is not None:
                errors.append(f"rank {rank} of {self.size}:\n{error}")
        return errors, silent

    def end(self) -> None:
        for process, channel in zip(self.ranks, self.channels, strict=True):
            process.kill()
            process.wait()
            channel.close()
        self.socket.close()


def rank_of_words(rank: str, size: str, port: str, channel: str) -> None:
    """What each of the processes does, until the test process has ended."""
    torch.set_num_threads(1)
    keep_meshes()
    calls, environment, folder = Connection(int(channel)), dict(os.environ), Path.cwd()
    environment |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": "2"}  # as on two nodes
    timeout = timedelta(seconds=LIMIT)
    store = dist.TCPStore("127.0.0.1", int(port), int(size), rank == "0", timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(size), timeout=timeout)
    while True:
        try:
            module, name, arguments = calls.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        os.environ.update(environment)
        os.chdir(folder)
        torch.manual_seed(0)
        began, error = time.process_time(), None
        try:
            getattr(importlib.import_module(module), name)(int(rank), *arguments)
            dist.barrier()
        except BaseException:
            error = traceback.format_exc()
        sys.stdout.flush()
        gc.collect()
        calls.send((error, time.process_time() - began))
        if error is not None:
            os._exit(1)


def keep_meshes() -> None:
    """Make the groups of a layout once: each model's own would leave threads and sockets behind."""
    make = cache(mesh._meshes.__wrapped__)
    others = {"offload": False, "param_dtype": None, "reshard_after_forward": True, "sum_gradients": "update"}
    mesh._meshes = lambda sharding, *place: make(replace(sharding, **others), *place)
