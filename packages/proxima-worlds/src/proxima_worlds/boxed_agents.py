"""Runs the programs of agents in containers or sandboxes, from which they can reach only the run's endpoint."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import urlsplit

from proxima.data import as_field_errors, within
from proxima.environment.agent_kinds import AgentSandbox, AgentSpec
from proxima.environment.agents import AgentJob, ProgramGroups, close_pipes, start_program
from proxima.process.children import ENDS_WITH_US, kill_group
from proxima.process.exit_status import describe_exit, of_program
from proxima.process.sandbox import Sandbox, SandboxMissing, program_paths, usable_kind
from proxima_worlds.containers import (
    PORT,
    Container,
    ContainerFailed,
    Containers,
    Place,
    Places,
    auto_engine,
    client_environment,
    engine_program,
    ensure_image,
    image_id,
    last_lines,
)

ADDRESS = f"http://127.0.0.1:{PORT}/v1"  # of the endpoint, for an agent
MOST_CONNECTIONS = 32  # to the endpoint, of one agent: it may not use up the files of the run
PART = 1 << 16  # bytes
END_SECONDS = 30.0  # that an engine may take to remove a container whose first process has ended
SAID = {125: "can't be started", 126: "can't be run", 127: "its command was not found"}


@dataclass(frozen=True, kw_only=True)
class ContainerBox(Container, AgentSandbox):
    """Each program runs in a container of its own.

    Args: as `Container`
    """

    text_field: ClassVar[str] = "image"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mounts", tuple(self.mounts))
        with as_field_errors(ContainerFailed):
            super().__post_init__()

    def runner(self, spec: AgentSpec) -> "ContainerRunner":
        return ContainerRunner(spec, self)

    def inputs(self) -> Mapping[str, str]:
        """The id of the image."""
        with as_field_errors(ContainerFailed):
            return {f"image {self.image}": image_id(engine_program(self.engine), self.image)}

    def auto_outcome(self, field: str) -> tuple[str, str] | None:
        return auto_engine() if field == "engine" else None


@dataclass(frozen=True, kw_only=True)
class BubblewrapBox(AgentSandbox):
    """Each program runs in a sandbox of bubblewrap of its own."""

    shows_files: ClassVar[bool] = True

    def runner(self, spec: AgentSpec) -> "SandboxRunner":
        return SandboxRunner(spec)


class ContainerRunner:
    """Starts each program in a container of its own."""

    def __init__(self, spec: AgentSpec, container: Container) -> None:
        self.command = tuple(spec.command)
        self.container = container
        with within("sandbox"), as_field_errors(ContainerFailed):
            program = engine_program(self.container.engine)
            ensure_image(program, self.container.image)
            self.containers = Containers(program)
            try:
                self.containers.try_start(self.container)
            except BaseException:
                self.containers.close()
                raise

    @asynccontextmanager
    async def running(self, job: AgentJob) -> AsyncIterator[asyncio.subprocess.Process]:
        place = self.containers.place(self.container)
        options = ["--interactive", *place.variables({"HOME": "/tmp"} | job.variables(ADDRESS))]
        folder = self.containers.places.folder  # conmon leaves a file in the current folder
        line = self.containers.command(self.container, place, self.command, *options, port=PORT)
        async with forwarded(place, job.base_url):
            process = None
            try:
                process = await start_program(line, client_environment(), start_new_session=True, cwd=folder)
                yield process
            finally:
                place.close()
                if process is not None:
                    await ended(process)

    def describe(self, code: int, errors: str) -> str:
        its_own = of_program(code)
        if its_own == code:
            how = describe_exit(its_own)
        else:
            how = f"{describe_exit(its_own)} (exit code {code})"
        said = last_lines(errors)
        return ": ".join(filter(None, [f"{how} of its container", SAID.get(code, ""), said]))

    def close(self) -> None:
        self.containers.close()


class SandboxRunner:
    """Starts each program in a sandbox of bubblewrap."""

    def __init__(self, spec: AgentSpec) -> None:
        self.command = tuple(spec.command)
        readable = list(map(os.path.abspath, spec.readable))
        for word in spec.command:
            if os.path.exists(word):
                readable += program_paths(word)
        self.readable = tuple(readable)
        self._programs = ProgramGroups()
        with as_field_errors(SandboxMissing):
            usable_kind("bubblewrap")
        with within("sandbox"), as_field_errors(ContainerFailed):
            self.places = Places()

    @asynccontextmanager
    async def running(self, job: AgentJob) -> AsyncIterator[asyncio.subprocess.Process]:
        place = self.places.add()
        sandbox = Sandbox(kind="bubblewrap", readable=(str(place.folder), *self.readable), processes=256)
        relay = str(place.folder / self.places.relay.name)
        program = [relay, str(place.folder), str(PORT), *self.command]
        variables = job.variables(ADDRESS) | sandbox.variables
        async with forwarded(place, job.base_url):
            try:
                with sandbox.command(program) as (line, fds):
                    process = await start_program(line, variables, pass_fds=fds, **ENDS_WITH_US)
                async with self._programs.killed_at_end(process):
                    yield process
            finally:
                place.close()

    def describe(self, code: int, errors: str) -> str:
        return describe_exit(Sandbox(kind="bubblewrap").exit_code(code), last_lines(errors))

    def close(self) -> None:
        self._programs.kill()
        self.places.close()


async def ended(process: asyncio.subprocess.Process) -> None:
    """Wait until an engine's command has ended; it is killed if it does not, or when the task that waits is cancelled,
    as by a second Ctrl-C."""
    try:
        async with asyncio.timeout(END_SECONDS):
            await asyncio.gather(process.wait(), _discarded(process.stdout), _discarded(process.stderr))
    except (TimeoutError, asyncio.CancelledError) as reason:
        kill_group(process.pid)
        close_pipes(process)
        await process.wait()
        if isinstance(reason, asyncio.CancelledError):
            raise


async def _discarded(pipe: asyncio.StreamReader | None) -> None:
    """Read what is left in a pipe: asyncio takes no process for ended that has said more than was read."""
    while pipe is not None and await pipe.read(PART):
        pass


@asynccontextmanager
async def forwarded(place: Place, base_url: str) -> AsyncIterator[None]:
    """Serve the socket `net` of a place: each connection is forwarded to the endpoint at `base_url`, up to
    MOST_CONNECTIONS of them at once."""
    address = urlsplit(base_url)
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(tasks) == MOST_CONNECTIONS:
            writer.close()
            return
        task = asyncio.ensure_future(_forward(reader, writer, address.hostname, address.port))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    socket = place.folder / "net"
    server = await asyncio.start_unix_server(connected, socket)
    socket.chmod(0o666)  # no other user can enter the folder above
    try:
        yield
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str | None, port: int | None
) -> None:
    """Copy both ways between a connection and the endpoint until both sides have ended."""
    writers = [writer]
    try:
        with suppress(OSError):
            reader_there, writer_there = await asyncio.open_connection(host, port)
            writers.append(writer_there)
            await asyncio.gather(_copy(reader, writer_there), _copy(reader_there, writer))
    finally:
        for each in writers:
            each.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(PART):
        writer.write(part)
        await writer.drain()
    writer.write_eof()
