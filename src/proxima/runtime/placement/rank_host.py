"""The actor of a rank. It starts the rank's process on its node and reports the output and the exit code to the
supervisor. All methods run in the actor's event loop; the process is killed when the loop's thread ends."""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import proxima
import proxima.engine
from proxima.runtime.placement.door import Door

START = Path(str(proxima.engine.__file__)).with_name("process_start.py")
CHUNK = 1 << 16
MOST_LINES = 1000  # in one report
LEASE_SECONDS = 600.0  # without a request from a supervisor, which may have been suspended
CLOSING_SECONDS = 5.0  # to read what a dead process has written; a child of it may hold the pipe open


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """The place of a rank.

    Args:
        node: Ray's id of the node.
        address: of the node, for the other ranks.
        gpus: the ids of the devices that Ray gave the actor.
        version: of proxima on that node.
    """

    node: str
    address: str
    host: str
    gpus: tuple[str, ...]
    version: str


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The output of a rank since the last report, as pairs of the stream (1 or 2) and a line, and its exit code: -N is
    signal N, None means that it is running."""

    lines: tuple[tuple[int, str], ...]
    exit_code: int | None


class RankHost:
    """An asynchronous actor: `ray.remote(RankHost)`."""

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self.channel: socket.socket | None = None
        self.lines: list[tuple[int, str]] = []
        self.exit_code: int | None = None
        self.news = asyncio.Event()
        self.doors: list[Door] = []
        self.asked = time.monotonic()  # when the supervisor last asked for a report
        self.tasks: list[asyncio.Task[None]] = []

    async def place(self) -> RankPlace:
        import ray

        context = ray.get_runtime_context()
        gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        address = str(ray.util.get_node_ip_address())
        return RankPlace(
            node=context.get_node_id(),
            address=address,
            host=socket.gethostname(),
            gpus=gpus,
            version=proxima.__version__,
        )

    async def free_port(self) -> int:
        """A port of this node on which nothing listens."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return int(listener.getsockname()[1])

    async def start(
        self, function: str, arguments: Mapping[str, Any], environment: Mapping[str, str], python: str, folder: str
    ) -> None:
        """Start the process.

        Args:
            environment: variables in addition to those of this node.
            python, folder: interpreter and working folder of the supervisor, used if this node has them too.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = await asyncio.create_subprocess_exec(
                python if os.access(python, os.X_OK) else sys.executable,
                "-P",
                str(START),
                "proxima.runtime.placement.rank_process",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=os.environ | dict(environment),
                cwd=folder if os.path.isdir(folder) else None,
                start_new_session=True,  # Ctrl-C is for the supervisor
            )
        self.channel = ours  # open for as long as this actor lives
        ours.sendall(json.dumps({"function": function, "arguments": dict(arguments)}).encode() + b"\n")
        readers = [
            asyncio.create_task(self._read(number, stream))
            for number, stream in ((1, self.process.stdout), (2, self.process.stderr))
        ]
        waiting = asyncio.create_task(self._wait(self.process, readers))
        self.tasks = [*readers, waiting, asyncio.create_task(self._guard(os.getppid()))]

    async def _read(self, number: int, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        rest = b""
        while chunk := await stream.read(CHUNK):
            *whole, rest = (rest + chunk).split(b"\n")
            self._add(number, whole)
        if rest:
            self._add(number, [rest])

    def _add(self, number: int, lines: list[bytes]) -> None:
        self.lines += [(number, line.decode(errors="replace").rstrip("\r")) for line in lines]
        self.news.set()

    async def _wait(self, process: asyncio.subprocess.Process, readers: list["asyncio.Task[None]"]) -> None:
        code = await process.wait()
        await asyncio.wait(readers, timeout=CLOSING_SECONDS)
        self.exit_code = code
        self.news.set()

    async def _guard(self, raylet: int) -> None:
        """Exit when the raylet ends, which Ray does not guarantee, and when no supervisor asks any more: a rank that
        was given up as lost must not continue to write alongside its replacement."""
        while os.getppid() == raylet and time.monotonic() - self.asked < LEASE_SECONDS:
            await asyncio.sleep(1)
        await self.kill()
        os._exit(1)

    async def report(self, seconds: float) -> RankReport:
        """Return new lines or the exit code as soon as there are any, at the latest after `seconds`."""
        self.asked = time.monotonic()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.news.wait(), seconds)
        self.news.clear()
        lines, self.lines = self.lines[:MOST_LINES], self.lines[MOST_LINES:]
        if self.lines:
            self.news.set()
        return RankReport(lines=tuple(lines), exit_code=None if self.lines else self.exit_code)

    async def open_doors(self, count: int) -> list[int]:
        """Open `count` doors on this node, and return their ports; see `lead`."""
        self.doors = [Door() for _ in range(count)]
        return [await door.listen() for door in self.doors]

    async def lead(self, number: int, place: tuple[str, int] | None) -> None:
        """Let a door lead to an address and port; None: nowhere."""
        self.doors[number].lead(place)

    async def interrupt(self) -> None:
        """Interrupt the rank as Ctrl-C does."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)

    async def kill(self) -> None:
        """Kill the process and its session."""
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()
