"""Containers by the command line of podman or docker: how they start, what they may use, and that none of them outlives
the run. Standard library only.

A container has no network. Its first process is `relay.c`, compiled when the run starts, which reaches the run through
unix sockets in a folder that the container sees as `/proxima`: `life`, a connection that ends the container when it is
closed, so also when the run is killed; and `net`, for what the caller serves at `PORT` of the container's loopback
interface.
"""

import json
import os
import re
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from proxima.process.children import ENDS_WITH_US, kill_group, start_module
from proxima.process.sandbox import SandboxMissing, system_call_filter
from proxima_worlds import container_guardian as guardian
from proxima_worlds.awaited_commands import run_shown

ENGINES = ("podman", "docker")
INSIDE = "/proxima"  # the folder of the sockets and the relay, in a container
RELAY = f"{INSIDE}/relay"
PORT = 8642  # of a container's loopback interface
RELAY_SOURCE = Path(__file__).with_name("relay.c")
# of this process, for the program of an engine: all that it is told. Where its settings, images and registries are.
CLIENT_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "TMPDIR",
    "XDG_RUNTIME_DIR",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "XDG_CACHE_HOME",
    "DBUS_SESSION_BUS_ADDRESS",
    "CONTAINERS_CONF",
    "CONTAINERS_CONF_OVERRIDE",
    "CONTAINERS_STORAGE_CONF",
    "CONTAINERS_REGISTRIES_CONF",
    "CONTAINER_HOST",
    "CONTAINER_SSHKEY",
    "REGISTRY_AUTH_FILE",
    "STORAGE_DRIVER",
    "STORAGE_OPTS",
    "DOCKER_HOST",
    "DOCKER_CONFIG",
    "DOCKER_CONTEXT",
    "DOCKER_CERT_PATH",
    "DOCKER_TLS_VERIFY",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)
COMPILE = ("cc", "-static", "-O1", "-pthread")
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MOST_FILES = 4096  # open at once, per process
MOST_PROCESSES = 32768  # of a user; `pids` limits those of a container
RELAY_THREADS = 64  # a container may have them besides its processes
PLACE = r"/[^:,]+"  # of a container
WITHOUT = "below / without : and ,"
PULL_SECONDS = 3600.0
TRIAL_SECONDS = 300.0
ANSWER_SECONDS = 60.0
END_SECONDS = 60.0


class ContainerFailed(SandboxMissing):
    """Containers can't be used; `field` is the field of `Container` that is wrong, empty for none, and `bound` says
    what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Container:
    """A container as specified in a recipe.

    Args:
        image: its name; it is pulled before the first step if the engine does not have it.
        engine: `podman`, `docker`, or `auto`: the first of them that is installed.
        memory_mb: MiB of memory, files in /tmp included; swap is not used.
        cpus: number of processors.
        pids: number of processes and threads.
        mounts: files and folders that it sees, read-only: PATH, seen at the same path, or PATH:SEEN.
        workdir: a folder of the container in which its command starts, writable and empty; empty: that of the image.
        writable: true: all files of the image may be changed in the container, with the usual capabilities of the
            engine, as to install packages; false: only /tmp, /run and `workdir`, without capabilities.
        network: true: the engine's usual network, too.
    """

    image: str
    engine: str = "auto"
    memory_mb: int = 1024
    cpus: float = 1.0
    pids: int = 256
    mounts: tuple[str, ...] = ()
    workdir: str = ""
    writable: bool = False
    network: bool = False

    def __post_init__(self) -> None:
        for field, fine, bound in (
            ("image", bool(re.fullmatch(r"\w[\w.:/@-]*", self.image, re.ASCII)), "is not the name of an image"),
            ("engine", self.engine in ("auto", *ENGINES), f"must be auto, {' or '.join(ENGINES)}"),
            ("memory_mb", self.memory_mb >= 16, "must be >= 16"),
            ("cpus", self.cpus > 0, "must be > 0"),
            ("pids", self.pids >= 1, "must be >= 1"),
            ("workdir", bool(re.fullmatch(PLACE, self.workdir or "/x")), f"must be an absolute path {WITHOUT}"),
        ):
            if not fine:
                raise ContainerFailed(field, getattr(self, field), bound)
        for mount in self.mounts:
            path, colon, seen = mount.partition(":")
            if not path or not Path(path).exists():
                raise ContainerFailed("mounts", mount, "does not exist")
            if colon and not re.fullmatch(PLACE, seen):
                raise ContainerFailed("mounts", mount, f"must be PATH, or PATH:SEEN with an absolute path {WITHOUT}")

    def limits(self, space_mb: int = 0, keep: bool = False) -> list[str]:
        """The options that say what a container may use, for an engine's command line.

        Args:
            space_mb: MiB of its /tmp; 0: all of its memory.
            keep: its /tmp is a folder of the image, which lasts until the container is removed.
        """
        files = _limit(resource.RLIMIT_NOFILE, MOST_FILES)
        processes = _limit(resource.RLIMIT_NPROC, MOST_PROCESSES)
        options = ["--security-opt=no-new-privileges", "--pull=never"]
        if not self.network:
            options.append("--network=none")
        if not self.writable:
            options += ["--cap-drop=all", "--read-only"]
        options += [f"--memory={self.memory_mb}m", f"--memory-swap={self.memory_mb}m", f"--cpus={self.cpus:g}"]
        options += [f"--pids-limit={self.pids + RELAY_THREADS}", f"--ulimit=nofile={files}:{files}", "--ulimit=core=0"]
        options += [f"--ulimit=nproc={processes}:{processes}"]  # the engine's may be above what this user may set
        if os.path.exists("/sys/fs/selinux/enforce"):
            options += ["--security-opt=label=disable"]  # else SELinux refuses the sockets
        if not keep:
            options += [f"--tmpfs=/tmp:rw,exec,mode=1777,size={space_mb or self.memory_mb}m"]
        if self.workdir:
            place = f"{self.workdir}:rw,exec,mode=1777,size={self.memory_mb}m"
            options += [f"--tmpfs={place}", f"--workdir={self.workdir}"]
        for mount in self.mounts:
            path, _, seen = mount.partition(":")
            options += [f"--volume={Path(path).resolve()}:{seen or os.path.abspath(path)}:ro"]
        return options


def _limit(name: int, most: int) -> int:
    hard = resource.getrlimit(name)[1]
    if hard == resource.RLIM_INFINITY:
        return most
    return min(hard, most)


@dataclass(frozen=True)
class ImageSettings:
    """Where the programs of an image start, and their variables."""

    folder: str
    variables: Mapping[str, str]


class Place:
    """The folder of one container or sandbox, which this process shares with it.

    It has the socket `life`, by which the container notices that the run has ended: the socket listens until `close`.

    Args:
        folder: made here.
        name: of the container.
        relay: a program that is linked into the folder.
        calls: a filter of system calls, in the file `filter`; empty: no filter.
    """

    def __init__(self, folder: Path, name: str, relay: Path, calls: bytes) -> None:
        self.folder = folder
        self.name = name
        self._files = count()
        folder.mkdir()
        folder.chmod(0o755)  # whatever the umask: a container may run as another user
        if calls:
            (folder / "filter").write_bytes(calls)
            (folder / "filter").chmod(0o644)
        os.link(relay, folder / relay.name)
        self._life = socket.socket(socket.AF_UNIX)
        self._life.bind(str(folder / "life"))
        self._life.listen()
        (folder / "life").chmod(0o666)  # no other user can enter the folder above

    def variables(self, variables: Mapping[str, str]) -> list[str]:
        """The options of an engine's command that give variables to what it starts in the container. They go through a
        file that only this user can read: they never reach the engine's own program, and no list of processes.

        Raises:
            ContainerFailed: a value has more than one line.
        """
        if not variables:
            return []
        for name, value in variables.items():
            if not VARIABLE_NAME.fullmatch(name) or set(value) & {"\n", "\r", "\0"}:
                raise ContainerFailed("env", name, "must be a variable whose value is one line")
        file = self.folder.parent / f"{self.folder.name}-{next(self._files)}.env"
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as lines:
            lines.writelines(f"{name}={value}\n" for name, value in variables.items())
        return [f"--env-file={file}"]

    def close(self) -> None:
        """End the container, if it runs: its first process is connected to `life`."""
        self._life.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        for file in self.folder.parent.glob(f"{self.folder.name}-*.env"):
            file.unlink(missing_ok=True)


class Places:
    """A private folder with the relay, and in it a place for each container or sandbox.

    Raises:
        ContainerFailed: the relay can't be compiled.
    """

    def __init__(self) -> None:
        self.run = f"proxima-{_owner(os.getpid())}-{secrets.token_hex(4)}"
        _remove_folders()
        parent = tempfile.gettempdir()
        if len(parent) >= 40:  # paths of sockets are short
            parent = "/tmp"
        self.folder = Path(parent, self.run)
        self.folder.mkdir(mode=0o700)
        self._numbers = count()
        try:
            self.relay = compile_relay(self.folder)
        except BaseException:
            self.close()
            raise

    def add(self, calls: bytes = b"") -> Place:
        """A place for another container or sandbox; `calls` is a filter as of `sandbox.system_call_filter`."""
        number = next(self._numbers)
        return Place(self.folder / str(number), f"{self.run}-{number}", self.relay, calls)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Containers:
    """Starts containers, until `close`.

    Raises:
        ContainerFailed: they can't be used here; the message says why.
    """

    def __init__(self, program: str) -> None:
        self.program = program
        self.working_tests: set[tuple[str, ...]] = set()  # of tasks, see `harbor_agents`
        self.unseen_said: set[str] = set()  # of tasks, too
        dead = [list(filter(_is_dead, found(program) or ())) for found in (guardian.names, guardian.volumes)]
        guardian.remove(program, *dead)  # of runs that were killed together with their guardians
        self.places = Places()
        facts = program, self.places.run, self.places.folder
        self._guardian = start_module(guardian.__name__, *facts, flag="-I")

    def place(self, spec: Container) -> Place:
        """A place for a container; one that may not change its image has the filter of the sandbox, too."""
        if spec.writable:
            return self.places.add(b"")
        return self.places.add(system_call_filter())

    def command(
        self,
        spec: Container,
        place: Place,
        program: Sequence[str],
        *options: str,
        port: int = 0,
        space_mb: int = 0,
        keep: bool = False,
    ) -> list[str]:
        """The command that runs a program in a container, which is removed when it ends.

        Args:
            program: empty: the container waits for its end.
            options: more of them, for `run`.
            port: where `net` is served, 0: nowhere.
            space_mb: see `Container.limits`.
            keep: it can be stopped and started again with all its files, until `remove`. Volumes in `options` begin
                with the place's name.
        """
        line = [self.program, "run"]
        if not keep:
            line.append("--rm")
        line += [f"--name={place.name}", f"--label={guardian.LABEL}={self.places.run}"]
        line += ["--log-driver=none", "--stop-signal=KILL", f"--volume={place.folder}:{INSIDE}:ro"]
        line += [*spec.limits(space_mb, keep), *options, f"--entrypoint={RELAY}", spec.image]
        return [*line, INSIDE, str(port), *program]

    def remove(self, places: Sequence[Place], volumes: Sequence[str] = ()) -> None:
        """End containers that were started with `keep`, and have them and then the volumes removed, without waiting for
        that."""
        for place in places:
            place.close()
        facts = self.program, [place.name for place in places], volumes
        threading.Thread(target=guardian.remove, args=facts, daemon=True).start()

    def try_start(self, spec: Container) -> None:
        """Start a container that ends at once: one line says why none can start, instead of each episode.

        Raises:
            ContainerFailed: the line.
        """
        place = self.place(spec)
        try:
            ran = _run(self.command(spec, place, [RELAY]), TRIAL_SECONDS, cwd=self.places.folder)
        finally:
            place.close()
        if ran.returncode:
            message = f"can't be started by {self.program}: {last_lines(ran.stderr or ran.stdout)}"
            raise ContainerFailed("image", spec.image, message)
        warning = last_lines(ran.stderr)  # as: limits are ignored here
        if warning:
            print(f"containers: {warning}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove what is left of the containers; may be called twice."""
        self._guardian.end(END_SECONDS)


def client_environment() -> dict[str, str]:
    """The whole environment of an engine's program: names of a fixed list, as this process has them. What a task or a
    row says is never among them."""
    own = {name: os.environ[name] for name in CLIENT_VARIABLES if name in os.environ}
    return {**own, "LANG": "C.UTF-8"}


def engine_program(engine: str) -> str:
    """The path of an engine's program.

    Raises:
        ContainerFailed: it is not installed, or this is not Linux.
    """
    if sys.platform != "linux":  # elsewhere they run in a virtual machine, which shares no sockets with this one
        raise ContainerFailed("engine", engine, "can't start containers: that needs Linux", "run without a container")
    names: tuple[str, ...] = (engine,)
    missing = f"{engine} is not"
    if engine == "auto":
        names = ENGINES
        missing = "neither podman nor docker is"
    for name in names:
        program = shutil.which(name)
        if program:
            return program
    raise ContainerFailed("engine", engine, f"can't start containers: {missing} installed", "install podman")


def auto_engine() -> tuple[str, str] | None:
    """The engine that `auto` chooses here, and the reason; None: neither is installed, which `engine_program`
    raises."""
    name = next(filter(shutil.which, ENGINES), None)
    if name is None:
        return None
    if name == ENGINES[0]:
        return name, "it is installed"
    return name, f"{ENGINES[0]} is not installed"


@lru_cache(maxsize=64)
def ensure_image(program: str, image: str) -> str:
    """Pull an image if the engine does not have it, showing its progress. Returns the image's id.

    Raises:
        ContainerFailed: it can't be pulled.
    """
    known = image_id(program, image)
    if not known:
        code, said = run_shown([program, "pull", image], PULL_SECONDS, environment=client_environment())
        if code:
            message = f"is not an image that {program} has, and can't be pulled: {said}"
            remedy = "build or pull it, or set `engine` to the program that has it"
            raise ContainerFailed("image", image, message, remedy)
        known = image_id(program, image)
    return known


def image_id(program: str, image: str) -> str:
    """The id of an image; empty if the engine does not have it."""
    return _run([program, "image", "inspect", "--format", "{{.Id}}", image], ANSWER_SECONDS).stdout.strip()


@lru_cache(maxsize=64)
def image_settings(program: str, image: str) -> ImageSettings:
    """What an image says of the containers made of it.

    Raises:
        ContainerFailed: the engine does not have it.
    """
    said = _run([program, "image", "inspect", "--format", "{{json .Config}}", image], ANSWER_SECONDS)
    try:
        config = json.loads(said.stdout) or {}
        pairs = (line.partition("=") for line in config.get("Env") or ())
        return ImageSettings(config.get("WorkingDir") or "/", {name: value for name, _, value in pairs})
    except (ValueError, AttributeError, TypeError):
        raise ContainerFailed("image", image, f"is not known to {program}: {last_lines(said.stderr)}") from None


def compile_relay(folder: Path) -> Path:
    """Compile the first process of containers and sandboxes into a folder.

    Raises:
        ContainerFailed: there is no compiler, or no static C library.
    """
    relay = folder / "relay"
    remedy = "install a C compiler and a static C library (Debian: gcc libc6-dev; Fedora: gcc glibc-static)"
    try:
        made = _run([*COMPILE, str(RELAY_SOURCE), "-o", str(relay)], TRIAL_SECONDS)
    except ContainerFailed as error:
        raise ContainerFailed("", None, f"a container needs {COMPILE[0]}, which {error.bound}", remedy) from None
    if made.returncode:
        raise ContainerFailed("", None, f"{COMPILE[0]} can't compile relay.c: {last_lines(made.stderr)}", remedy)
    relay.chmod(0o755)
    return relay


def _remove_folders() -> None:
    """Remove the folders of runs of this machine that are gone."""
    for parent in {tempfile.gettempdir(), "/tmp"}:
        for folder in Path(parent).glob("proxima-*-*-*-*"):
            if _is_dead(folder.name):
                shutil.rmtree(folder, ignore_errors=True)


def _owner(pid: int) -> str:
    """A process of this machine: its name, the process id, and when it started, which tells ids used again apart."""
    started = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return f"{_machine()}-{pid}-{started}"


def _machine() -> str:
    return re.sub(r"[^a-zA-Z0-9]", "_", socket.gethostname())[:32] or "_"


def _is_dead(name: str) -> bool:
    """True if a container or folder belongs to a process of this machine that has ended."""
    parts = name.split("-")
    if len(parts) < 5 or parts[0] != "proxima" or parts[1] != _machine() or not parts[2].isdigit():
        return False
    with suppress(OSError):
        return not name.startswith(f"proxima-{_owner(int(parts[2]))}-")
    return True


def last_lines(text: str, lines: int = 4, characters: int = 500) -> str:
    """The last lines of what a program said, as one line."""
    return " | ".join(line.strip() for line in text.strip().splitlines()[-lines:])[-characters:]


def _run(command: Sequence[str], seconds: float, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command without input and return its output, as text.

    Raises:
        ContainerFailed: it can't be started, or takes longer than `seconds`; it is then killed with all it has started.
    """
    options |= {"env": client_environment(), "text": True, "errors": "replace", **ENDS_WITH_US}
    options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    program = command[0]
    what = " ".join(command[1:3])
    try:
        with subprocess.Popen(command, **options) as process:
            try:
                out, errors = process.communicate(timeout=seconds)
            except BaseException:
                kill_group(process.pid)
                raise
    except subprocess.TimeoutExpired:
        raise ContainerFailed("engine", program, f"did not finish `{what}` in {seconds:g} s") from None
    except OSError as error:
        raise ContainerFailed("engine", program, f"can't be started: {error.strerror}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, errors)
