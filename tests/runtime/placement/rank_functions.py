"""What the ranks of the tests do."""

import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "EXTRA")


def play(
    folder: str, acts: list[dict[str, str | int]], supervisor: int = 0, resume: bool = False, overwrite: bool = False
) -> int:
    """Meet the other ranks, and do what `acts` says of this start and this rank; else wait.

    Args:
        acts: of each start, rank → its exit code, or what happens to it: `kill`, of itself or of its parent (`actor`),
            an exception (`raise`), or Ctrl-C of the process `supervisor` (`interrupt`).
    """
    rank = os.environ["RANK"]
    start = len(list(Path(folder).glob(f"{rank}.*.json")))
    act = acts[start].get(rank) if start < len(acts) else None
    try:
        print(f"waits {rank}")
        note(folder, resume=resume)
        if "WORLD_SIZE" in os.environ:
            meet(int(rank), int(os.environ["WORLD_SIZE"]) - 1)
        if isinstance(act, int):
            return act
        if act == "raise":
            raise RuntimeError("a bad day")
        if act is not None:
            pid = {"kill": os.getpid(), "actor": os.getppid(), "interrupt": supervisor}[act]
            os.kill(pid, signal.SIGINT if act == "interrupt" else signal.SIGKILL)
        for _ in range(6000):  # one long sleep would miss a signal that comes just before it
            time.sleep(0.1)
    except KeyboardInterrupt:
        print("writes a checkpoint")
        return 130
    return 0


def meet(rank: int, others: int) -> None:
    """Return when all ranks have called: the others call rank 0, where the variables say that it is."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        with socket.create_server(place) as server:
            for channel in [server.accept()[0] for _ in range(others)]:
                channel.sendall(b".")
        return
    while True:
        with suppress(ConnectionRefusedError), socket.create_connection(place) as channel:
            assert channel.recv(1)
            return
        time.sleep(0.02)


def note(folder: str, **values: Any) -> None:
    """Write a file of this rank with its variables."""
    record = {name: os.environ.get(name) for name in NAMES} | values | {"pid": os.getpid(), "python": sys.executable}
    file = Path(folder, f"{os.environ['RANK']}.{os.getpid()}.json")
    file.with_suffix(".part").write_text(json.dumps(record))
    file.with_suffix(".part").rename(file)


def write(text: str) -> None:
    sys.stderr.write(text)
