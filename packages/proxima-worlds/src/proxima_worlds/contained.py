"""Runs our own Python modules in containers, where bubblewrap can't be used: the fork servers of workers, and the
servers that run a model's code for workers outside.

No image is pulled. A container has the same files as a sandbox of bubblewrap: the system's libraries and this
interpreter with its packages, read-only, and nothing else. It has no network, and ends with the run, as `containers`
says. Standard library only.
"""

import hashlib
import io
import os
import select
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from proxima.process.children import ONE_THREAD, START, Child, kill_group, placed, wait_for
from proxima.process.exit_status import describe_exit
from proxima.process.program import keep_last
from proxima.process.sandbox import Sandbox, random_user, shown_paths
from proxima_worlds.containers import (
    END_SECONDS,
    ENGINES,
    INSIDE,
    TRIAL_SECONDS,
    Container,
    ContainerFailed,
    Containers,
    Place,
    client_environment,
    engine_program,
    image_id,
    last_lines,
)

CONTAINER_MEMORY_MB = 256  # of a container, besides the code's: its server and its files
PACKAGE = Path(__file__).resolve().parent
ROOT_IMAGE = "localhost/proxima-root"
FOLDERS = ("dev", "etc", "proc", "run", "sys", "tmp")
CODE_SERVER = "proxima_worlds.code_server"
CODE_CAPABILITIES = ("SETUID", "SETGID", "CHOWN", "KILL")  # it gives each code a user of its own
CODE_PIDS = 16
REMEDY = "see that podman or docker can start a container, or set sandbox=auto"
LINES = 4  # kept of what a container says
BEAT = 0.05  # seconds between looks
STARTS = 3  # in a row that may fail


@dataclass(frozen=True)
class ContainedChild(Child):
    """A container that runs a module of ours; `process` is the engine's command."""

    place: Place = field(kw_only=True)
    lines: Sequence[str] = ()
    reader: threading.Thread | None = None

    def end(self, seconds: float = 0.0) -> int:
        """Close the socket, wait `seconds` for the container to end by itself, then end it. Returns the exit code of
        the engine's command; may be called twice."""
        self.channel.close()
        if seconds:
            wait_for(self.process, seconds)
        self.place.close()
        if wait_for(self.process, END_SECONDS) is None:
            kill_group(self.process.pid)
        return self.process.wait()

    def said(self) -> str:
        """How the container ended, and the last lines of what it said."""
        code = self.process.wait()
        if self.reader is not None:
            self.reader.join(END_SECONDS)
        return describe_exit(code, last_lines("\n".join(self.lines)))


class Contained:
    """Starts modules of ours in containers of one kind.

    Raises:
        ContainerFailed: no container can be started here.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        links, places = shown_paths(replace(sandbox, readable=(*sandbox.readable, str(PACKAGE))))
        program = engine_program("auto")
        memory_mb = sandbox.memory_mb or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
        self.spec = Container(
            image=root_image(program, links),
            memory_mb=memory_mb,
            cpus=len(os.sched_getaffinity(0)),
            pids=sandbox.processes or CODE_PIDS,
            mounts=tuple(places),
        )
        self.containers = Containers(program)

    def start(self, module: str, variables: Mapping[str, str], flag: str = "-P", root: bool = False) -> ContainedChild:
        """Start a module in a container of its own; its channel is as that of `children.start_module`.

        Args:
            flag: of the interpreter.
            root: as root with `CODE_CAPABILITIES` and no shared memory, else as an unprivileged user without any.
        Raises: ContainerFailed: it can't be started, with the last lines of what the engine said.
        """
        place = self.containers.place(self.spec)
        options = [*container_options(root), *place.variables(variables)]
        program = [sys.executable, flag, str(START), placed(module), f"{INSIDE}/channel"]
        line = self.containers.command(self.spec, place, program, *options, space_mb=self.sandbox.space_mb)
        with socket.socket(socket.AF_UNIX) as listener:
            path = place.folder / "channel"
            listener.bind(str(path))
            path.chmod(0o666)  # no other user can enter the folder above
            listener.listen()
            process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True, cwd=self.containers.places.folder, env=client_environment(),
            )  # fmt: skip
            lines = deque[str](maxlen=LINES)
            reader = threading.Thread(target=keep_last, args=(process.stdout, lines), daemon=True)
            reader.start()
            child = ContainedChild(process, socket.socket(), place=place, lines=lines, reader=reader)
            deadline = time.monotonic() + TRIAL_SECONDS
            while not select.select([listener], [], [], BEAT)[0]:
                if process.poll() is not None or time.monotonic() > deadline:
                    late = process.poll() is None
                    if late:
                        said = f"does not start in {TRIAL_SECONDS:g} s"
                    else:
                        said = f"can't be started: {child.said()}"
                    child.end()
                    raise ContainerFailed("", None, f"a container of {self.containers.program} {said}")
            channel, _ = listener.accept()
        path.unlink()
        return replace(child, channel=channel)

    def close(self) -> None:
        """Remove what is left of the containers; may be called twice."""
        self.containers.close()


def container_options(root: bool) -> list[str]:
    """Options of an engine's command line for one container; see `Contained.start`."""
    if not root:
        user = random_user()
        return [f"--user={user}:{user}"]
    capabilities = [f"--cap-add={name}" for name in CODE_CAPABILITIES]
    return ["--user=0:0", *capabilities, "--ipc=none"]


class ContainerSandbox:
    """The kind of sandbox `container`, see `proxima.process.sandbox.SandboxKind`."""

    @staticmethod
    def check() -> None:
        if not any(map(shutil.which, ENGINES)):
            missing = "can't be used: neither podman nor docker is installed"
            raise ContainerFailed("sandbox", "container", missing, "install podman, or set sandbox=auto")

    @staticmethod
    def starter(sandbox: Sandbox) -> "Contained":
        return Contained(sandbox)

    @staticmethod
    def code_servers(count: int, memory_mb: int) -> "CodeContainers":
        return CodeContainers(count, memory_mb)


class CodeContainers:
    """Containers, each with a `code_server`, for code that the run's workers execute, until `close`. One that ends is
    replaced.

    Args:
        count: how many codes run at once.
        memory_mb: MiB that each code may need.
    Raises: ContainerFailed: none can be started; it names the field `sandbox`.
    """

    def __init__(self, count: int, memory_mb: int) -> None:
        self._closed = threading.Event()
        self._running: dict[int, ContainedChild] = {}
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._contained: Contained | None = None
        try:
            self._contained = Contained(Sandbox(kind="container", memory_mb=memory_mb + CONTAINER_MEMORY_MB))
            self.address = str(self._contained.containers.places.folder / "code")
            self._listener.bind(self.address)
            self._listener.listen(1024)
            first = self._started(self._contained)
        except BaseException as error:
            self.close()
            if not isinstance(error, ContainerFailed):
                raise
            bound = f"can't be used: {error}"
            remedy = error.remedy or REMEDY
            raise ContainerFailed("sandbox", "container", bound, remedy) from None
        for number in range(count):
            running = first if number == 0 else None
            thread = threading.Thread(target=self._keep, args=(number, self._contained, running), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _started(self, contained: Contained) -> ContainedChild:
        child = contained.start(CODE_SERVER, {"LANG": "C.UTF-8", **ONE_THREAD}, flag="-I", root=True)
        ready = b""
        with suppress(OSError):  # it has ended
            socket.send_fds(child.channel, [b"\n"], [self._listener.fileno()])
            ready = child.channel.recv(1)
        if not ready:
            said = child.said()
            child.end()
            raise ContainerFailed("", None, f"the server of code in a container ended: {said}")
        return child

    def _keep(self, number: int, contained: Contained, child: ContainedChild | None) -> None:
        """Keep a container running."""
        failures = 0
        while not self._closed.is_set():
            try:
                self._running[number] = child = child or self._started(contained)
                failures = 0
                if self._closed.is_set():
                    child.place.close()
                child.process.wait()
                child.end()
                child = None
            except (ContainerFailed, OSError) as error:
                failures += 1
                if failures == STARTS or self._closed.is_set():
                    print(f"containers: {error}", file=sys.stderr, flush=True)
                    return

    def close(self) -> None:
        """Kill the code and remove the containers; may be called twice."""
        self._closed.set()
        self._listener.close()
        for child in list(self._running.values()):
            with suppress(OSError):
                child.end()
        if self._contained is not None:
            self._contained.close()
        for thread in self._threads:
            thread.join(END_SECONDS)  # one may have been starting a container, which it ends


def root_image(program: str, links: list[str]) -> str:
    """The name of an image without files, but with these symbolic links of this machine's root; it is made if the
    engine does not have it.

    Raises:
        ContainerFailed: it can't be made.
    """
    targets = {path: os.readlink(path) for path in links}
    name = f"{ROOT_IMAGE}:{hashlib.sha256(repr((FOLDERS, targets)).encode()).hexdigest()[:12]}"
    if not image_id(program, name):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for folder in FOLDERS:
                entry = tarfile.TarInfo(folder)
                entry.type = tarfile.DIRTYPE
                entry.mode = 0o755
                archive.addfile(entry)
            for path, target in targets.items():
                entry = tarfile.TarInfo(path.lstrip("/"))
                entry.type = tarfile.SYMTYPE
                entry.linkname = target
                archive.addfile(entry)
        ran = subprocess.run(
            [program, "import", "-", name], input=packed.getvalue(), capture_output=True, env=client_environment()
        )
        if ran.returncode:
            said = last_lines(ran.stderr.decode(errors="replace"))
            raise ContainerFailed("", None, f"{Path(program).name} can't import an empty image: {said}")
    return name
