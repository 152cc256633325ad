"""Which sandbox a program runs in, and the command line that puts it there. Standard library only.

In bubblewrap a program has namespaces of its own: no network, no other process, no IPC; a read-only root of the
system's libraries, the interpreter and its packages; a private /proc, /dev and /tmp; its own environment and no
capability; and a filter of system calls. It ends with the process that started it. For root it runs as an unprivileged
user, since the kernel does not limit root's processes.
"""

import json
import os
import secrets
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from proxima.process.exit_status import of_program

GROUP = "proxima.sandboxes"  # entry points: the name of a kind that another distribution brings → a `SandboxKind`
OWN_CHOICES = ("auto", "bubblewrap", "none")
WORKERS_MEMORY_MB = 1024  # of a sandbox with a limit, besides the workers': their fork server with its libraries
REMEDY = "install bubblewrap and allow user namespaces, or set sandbox=none"
TRIAL_SECONDS = 60.0
MOST_LINKS = 40  # as the kernel
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/nix/store")
ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
VARIABLES = {"LANG": "C.UTF-8", "HOME": "/tmp", "TMPDIR": "/tmp", "PATH": "/usr/local/bin:/usr/bin:/bin"}
USERS = range(61184, 65520)  # ids that distributions leave to transient users
PACKAGE = Path(__file__).resolve().parent.parent


class SandboxMissing(Exception):
    """The sandbox that a field names is unknown or can't be used here; `bound` says why."""

    def __init__(self, field: str, value: object, bound: str, remedy: str = "") -> None:
        super().__init__(bound)
        self.field = field
        self.value = value
        self.bound = bound
        self.remedy = remedy


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """A sandbox for one program at a time.

    Args:
        kind: `bubblewrap`, `none`, or a kind that another distribution brings; see `usable_kind` for `auto`.
        readable: files and folders that it shows, read-only, besides the system's and the interpreter's.
        writable: a folder that it shows at its own path, in which the program starts; None: its private /tmp.
        space_mb: MiB of the private /tmp, and of /dev/shm.
        processes: processes and threads that the program may have; 0: it sets its own limit.
        memory_mb: MiB of memory of a kind that limits it, files included; 0: all that the machine has.
        ahead: start the process of the next code when the code before it runs, so that nobody waits for the sandbox.
    """

    kind: str = "none"
    readable: tuple[str, ...] = ()
    writable: str | None = None
    space_mb: int = 64
    processes: int = 0
    memory_mb: int = 0
    ahead: bool = False

    @contextmanager
    def command(self, program: Sequence[str]) -> Iterator[tuple[Sequence[str], tuple[int, ...]]]:
        """The command line that starts a program in the sandbox, and the descriptors to pass to it besides the
        program's own; they are closed at the end. The program has the environment with which the line is started."""
        if self.kind == "none":
            yield program, ()
            return
        receive, send = os.pipe()
        try:
            with open(send, "wb") as pipe:
                pipe.write(system_call_filter())
            yield bubblewrap_arguments(self, program, receive), (receive,)
        finally:
            os.close(receive)

    def starter(self) -> "ModuleStarter | None":
        """Starts modules in sandboxes of this kind; None: `children.start_module` does. Raises: SandboxMissing."""
        brought = brought_kind(self.kind)
        return None if brought is None else brought.starter(self)

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a program that needs nothing of this process's."""
        return dict(VARIABLES)

    def exit_code(self, code: int) -> int:
        """The exit code of the program, -N after signal N, given that of the command."""
        return code if self.kind == "none" else of_program(code)


def usable_kind(choice: str) -> str:
    """The kind of sandbox for a choice, which is checked here; for `auto`, bubblewrap where it works, else `none`.

    Raises: SandboxMissing.
    """
    require_known(choice)
    brought = brought_kind(choice)
    if brought is not None:
        brought.check()
        return choice
    if choice == "none":
        return "none"
    why = bubblewrap_problem()
    if choice == "bubblewrap" and why:
        raise SandboxMissing("sandbox", choice, f"can't be used: {why}", REMEDY)
    return "none" if why else "bubblewrap"


class ModuleStarter(Protocol):
    """Starts modules of ours in sandboxes of one kind, until `close`."""

    def start(self, module: str, variables: Mapping[str, str]) -> Any:
        """Start a module with these variables, and return its `children.Child`, as `children.start_module` does.
        Raises: SandboxMissing."""

    def close(self) -> None:
        """End what is left of the sandboxes; may be called twice."""


class CodeServers(Protocol):
    """Run code that workers outside ask for, see `code_runner`, until `close`.

    Args:
        address: of the unix socket on which they are asked.
    """

    address: str

    def close(self) -> None:
        """Kill the code; may be called twice."""


class SandboxKind(Protocol):
    """A kind of sandbox that another distribution brings; the entry point names an object with these functions, such as
    a class or a module."""

    def check(self) -> None:
        """Raise SandboxMissing, of the field `sandbox`, if it can't be used here."""

    def starter(self, sandbox: Sandbox) -> ModuleStarter:
        """Start modules in it. Raises: SandboxMissing."""

    def code_servers(self, count: int, memory_mb: int) -> CodeServers:
        """Run up to `count` codes at once, each of which may need `memory_mb` MiB. Raises: SandboxMissing."""


@lru_cache(maxsize=1)
def brought_kinds() -> dict[str, Any]:
    """The entry points of the kinds that other distributions bring, by their names."""
    from importlib.metadata import entry_points  # takes longer than the rest of this module

    return {point.name: point for point in entry_points(group=GROUP) if point.name not in OWN_CHOICES}


def brought_kind(kind: str) -> SandboxKind | None:
    """The kind that another distribution brings; None for those of this module, and for unknown ones."""
    if kind in OWN_CHOICES or kind not in brought_kinds():
        return None
    point = brought_kinds()[kind]
    loaded: SandboxKind = point.load()
    return loaded


def sandbox_choices() -> tuple[str, ...]:
    """What a field `sandbox` may say here."""
    return tuple(sorted({*OWN_CHOICES, *brought_kinds()}))


def require_known(choice: str) -> None:
    """Raise SandboxMissing unless a choice is known here; the remedy names the package that has more."""
    if choice not in sandbox_choices():
        more = "" if brought_kinds() else "the package proxima-worlds has more"
        raise SandboxMissing("sandbox", choice, f"must be one of {', '.join(sandbox_choices())}", more)


def auto_sandbox() -> tuple[str, str]:
    """The kind of sandbox that `auto` chooses here, and the reason."""
    why = bubblewrap_problem()
    if why:
        return ("none", why)
    return ("bubblewrap", "it starts on this machine")


def fallback_note(choice: str) -> str:
    """The line for the start of a run whose `auto` found no sandbox; empty if there is nothing to say."""
    if choice != "auto":
        return ""
    why = bubblewrap_problem()
    if not why:
        return ""
    return f"code runs without a sandbox, under limits that contain only accidents: {why}; {REMEDY}"


def python_sources(file: Path) -> list[str]:
    """The modules and packages that a module in this file may import: those beside it, and those in the folders of
    PYTHONPATH. Other files there, such as a run's, are left out."""
    folders = [Path(folder).absolute() for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    for folder in (file.absolute().parent, file.resolve().parent):  # the same, unless a link leads to it
        while (folder / "__init__.py").exists():
            folder = folder.parent
        folders.append(folder)
    return list(dict.fromkeys(chain.from_iterable(map(importable, folders))))


def importable(folder: Path) -> list[str]:
    """The modules and packages of Python in a folder, which itself is shown if it has packages alone; none if it can't
    be read."""
    if folder.name in ("site-packages", "dist-packages"):
        return [str(folder)]
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    return [str(path) for path in paths if path.suffix in (".py", ".so") or (path / "__init__.py").exists()]


@lru_cache(maxsize=1)
def bubblewrap_problem() -> str:
    """Why bubblewrap can't be used here, after a trial start; empty if it can."""
    if sys.platform != "linux":
        return "bubblewrap needs Linux"
    programs = ["bwrap"]
    if os.geteuid() == 0:
        programs.append("setpriv")
    for program in programs:
        if shutil.which(program) is None:
            return f"bubblewrap needs the program {program}, which is not installed"
    try:
        with Sandbox(kind="bubblewrap").command([sys.executable, "-I", "-c", ""]) as (line, fds):
            ran = subprocess.run(
                line, env={}, pass_fds=fds, stdin=subprocess.DEVNULL, capture_output=True, timeout=TRIAL_SECONDS
            )
    except (OSError, subprocess.SubprocessError) as error:
        return f"a trial start of bubblewrap failed: {error}"
    last = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
    if ran.returncode == 0:
        return ""
    why = last[0] if last else f"exit code {ran.returncode}"
    if os.geteuid() == 0 and "Permission denied" in why:
        why += " (root's code runs as another user, who must be able to read this Python: chmod -R go+rX)"
    return f"a trial start of bubblewrap failed: {why}"


# The search path, and the packages that a finder of setuptools shows where they are edited.
PLACES = """import json, sys
edited = [path for finder in sys.meta_path for path in
          getattr(sys.modules.get(getattr(finder, "__module__", "")), "MAPPING", {}).values()]
print(json.dumps([sys.path, edited]))"""


@lru_cache(maxsize=1)
def interpreter_paths() -> tuple[str, ...]:
    """The files and folders that this interpreter needs, isolated from the user's folder and variables, and installed
    packages."""
    listed = subprocess.run(
        [sys.executable, "-I", "-c", PLACES],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True, timeout=TRIAL_SECONDS,
    )  # fmt: skip
    path, edited = json.loads(listed.stdout)
    shown = [sys.base_prefix, sys.prefix, *map(os.path.realpath, (sys.base_prefix, sys.prefix)), str(PACKAGE)]
    shown += program_paths(sys.executable)
    shown += [str(Path(module)) for module in edited if os.path.isdir(module)]
    shown += [f"{module}.py" for module in edited if os.path.isfile(f"{module}.py")]
    for folder in filter(os.path.isdir, path):
        if any(Path(folder).is_relative_to(prefix) for prefix in (sys.base_prefix, sys.prefix)):
            shown.append(folder)
        else:  # of a project that is installed in place, which may have runs and secrets beside the modules
            shown += importable(Path(folder))
    return tuple(shown)


def program_paths(program: str) -> list[str]:
    """The files and folders that a program needs to start: itself, those to which its symbolic links lead, its virtual
    environment, and the Python of that."""
    shown = dict[str, None]()
    path = os.path.abspath(program)
    for _ in range(MOST_LINKS):
        folder, name = os.path.split(path)
        real = os.path.join(os.path.realpath(folder), name)
        for file in (path, real):
            shown |= dict.fromkeys([file, *installation(Path(file))])
        if not os.path.islink(real):
            break
        path = os.path.abspath(os.path.join(os.path.dirname(real), os.readlink(real)))
    environment = Path(program).absolute().parent
    is_python = Path(program).name == "python"
    if (environment.parent / "pyvenv.cfg").is_file() and not is_python:  # a script of the environment
        shown |= dict.fromkeys(program_paths(str(environment / "python")))
    return list(shown)


def installation(program: Path) -> list[str]:
    """The folder of the Python, or of the virtual environment, that has a program in its `bin`; empty for others, such
    as a user's own `bin`."""
    folder = program.parent.parent
    installed = (folder / "pyvenv.cfg").is_file() or any(folder.glob("lib*/python3*/os.py"))
    return [str(folder)] if installed else []


def shown_paths(sandbox: Sandbox) -> tuple[list[str], list[str]]:
    """The symbolic links that the root of a sandbox has, and the files and folders that it shows."""
    present = [path for path in SYSTEM if os.path.exists(path)]
    links = [path for path in present if os.path.islink(path)]
    shown = [path for path in (*ETC, *interpreter_paths(), *sandbox.readable) if os.path.exists(path)]
    return links, outermost([*shown, *(path for path in present if path not in links)])


def bubblewrap_arguments(sandbox: Sandbox, program: Sequence[str], filter_fd: int) -> list[str]:
    """The command line of bubblewrap that runs a program; it reads its filter of system calls from `filter_fd`."""
    links, places = shown_paths(sandbox)
    folder = sandbox.writable or "/tmp"
    private = ["--perms", "1777", "--size", str(sandbox.space_mb << 20), "--tmpfs"]
    line = [_found("bwrap"), "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent"]
    line += ["--new-session", "--hostname", "sandbox", "--cap-drop", "ALL", "--seccomp", str(filter_fd)]
    line += [*private, "/tmp", "--proc", "/proc", "--dev", "/dev", *private, "/dev/shm"]
    parents: set[str] = set()
    for path in (*places, folder):
        parents.update(map(str, Path(path).parents[:-1]))
    for parent in sorted(parents):
        line += ["--perms", "0755", "--dir", parent]
    for path in links:
        line += ["--symlink", os.readlink(path), path]
    for path in places:
        line += ["--ro-bind", path, path]
    if sandbox.writable is not None:
        line += ["--bind", sandbox.writable, sandbox.writable]
    line += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", folder]
    inside = [*program]
    if sandbox.processes:
        inside = [_found("prlimit"), f"--nproc={sandbox.processes}", "--core=0", *inside]
    if os.geteuid() != 0:
        return [*line, "--unshare-user", "--uid", "1000", "--gid", "1000", "--", *inside]
    user = random_user()
    if sandbox.writable is not None:
        os.chown(sandbox.writable, user, user)
    line += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--", _found("setpriv")]
    return [*line, f"--reuid={user}", f"--regid={user}", "--clear-groups", "--inh-caps=-all", *inside]


def random_user() -> int:
    """The id of a user for one sandbox."""
    return USERS[secrets.randbelow(len(USERS))]


def _found(program: str) -> str:
    """The path of a program, found by this process's PATH: that of the sandboxed program may be another."""
    return shutil.which(program) or program


def outermost(paths: Sequence[str]) -> list[str]:
    """The paths, without those that lie in another."""
    kept: list[str] = []
    for path in sorted({os.path.abspath(path) for path in paths}, key=lambda path: (len(path), path)):
        if not any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in kept):
            kept.append(path)
    return kept


# System calls that no capability guards: of other processes, namespaces, keys, memory that no limit counts, and the
# kernel itself. By machine: the number of its architecture, `clone`, `ioctl`, `socket`, and what is refused.
_SINCE_2019 = (425, 438, 447)  # io_uring_setup, pidfd_getfd, memfd_secret
SYSTEM_CALLS = {
    # ptrace, syslog, personality, unshare, setns, process_vm_readv, process_vm_writev, kcmp, add_key, request_key,
    # keyctl, shmget, semget, msgget, mq_open, memfd_create, bpf, userfaultfd, perf_event_open, name_to_handle_at
    "x86_64": (0xC000003E, 56, 16, 41, (101, 103, 135, 272, 308, 310, 311, 312, 248, 249, 250, 29, 64, 68, 240, 319,
                                        321, 323, 298, 303)),
    "aarch64": (0xC00000B7, 220, 29, 198, (117, 116, 92, 97, 268, 270, 271, 272, 217, 218, 219, 194, 190, 186, 180, 279,
                                           280, 282, 241, 264)),
}  # fmt: skip
NEW_NAMESPACES = 0x7E020000  # flags of `clone`
CLONE3 = 435  # its flags are in memory, where a filter can't read them; without it libraries use `clone`
TYPES_INTO_TERMINAL = (0x5412, 0x541C)  # requests of `ioctl`: TIOCSTI, TIOCLINUX
FAMILIES = (1, 2, 10, 16)  # of sockets that may be made: AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
# Instructions of BPF.
LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
ANY_BIT = 0x45
RETURN = 0x06
# Actions of seccomp.
ALLOW = 0x7FFF0000
REFUSE = 0x00050001  # the call fails with EPERM
UNKNOWN = 0x00050026  # the call fails with ENOSYS
KILL = 0x80000000
# Places of what a filter reads.
NUMBER = 0  # of the call
ARCHITECTURE = 4
FIRST = 16  # argument
SECOND = 24


@lru_cache(maxsize=1)
def system_call_filter() -> bytes:
    """A program of classic BPF for seccomp; on another machine than those of `SYSTEM_CALLS`, it allows all.

    An instruction is its code, how many to skip if its test holds and if not, and its operand.
    """
    if os.uname().machine not in SYSTEM_CALLS:
        return struct.pack("HBBI", RETURN, 0, 0, ALLOW)
    machine, clone, ioctl, make_socket, refused = SYSTEM_CALLS[os.uname().machine]
    allow = (RETURN, 0, 0, ALLOW)
    refuse = (RETURN, 0, 0, REFUSE)
    # Another machine than this one: kill.
    lines = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, machine), (RETURN, 0, 0, KILL)]
    # The calls that are refused, those of x32 among them.
    lines += [(LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, 0x40000000), refuse]
    lines += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, UNKNOWN)]
    for number in (*refused, *_SINCE_2019):
        lines += [(EQUAL, 0, 1, number), refuse]
    # `clone`: not with new namespaces.
    lines += [(EQUAL, 0, 4, clone), (LOAD, 0, 0, FIRST), (ANY_BIT, 0, 1, NEW_NAMESPACES), refuse, allow]
    # `ioctl`: not to type into a terminal.
    sti, linux = TYPES_INTO_TERMINAL
    lines += [(EQUAL, 0, 5, ioctl), (LOAD, 0, 0, SECOND), (EQUAL, 1, 0, sti), (EQUAL, 0, 1, linux), refuse, allow]
    # `socket`: of these families alone.
    lines += [(EQUAL, 0, 2 + 2 * len(FAMILIES), make_socket), (LOAD, 0, 0, FIRST)]
    for family in FAMILIES:
        lines += [(EQUAL, 0, 1, family), allow]
    lines.append(refuse)
    # Everything else.
    lines.append(allow)
    return b"".join(struct.pack("HBBI", *line) for line in lines)
