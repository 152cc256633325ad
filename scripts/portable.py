"""Rules of `house.py` about what differs from one computer to another.

encodings      who opens text says its encoding: without one it is that of the user's locale
platform       calls and files that only Linux has are in the modules of `LINUX`
clients        clients of HTTP servers are made by `system.http_clients`: they ask no proxy for this machine
"""

import ast
import re
from collections.abc import Iterator, Sequence

FOLDERS = ("scripts", "benchmarks", "examples", "evidence")  # beside the packages

_SANDBOX = "is part of a sandbox, which needs Linux"
LINUX = {
    "proxima.system.linux": "the calls, each with what other systems do",
    "proxima.system.machine": "facts about the machine, or that they are not known",
    "proxima.process.linux_process": "the calls about processes, each with what other systems do",
    "proxima.process.entry": "the first thing in a process, which loads no other module: `prctl`",
    "proxima.process.code_process": _SANDBOX,
    "proxima_worlds.code_server": _SANDBOX,
    "proxima_worlds.contained": _SANDBOX,
    "proxima_worlds.container_guardian": _SANDBOX,
    "proxima_worlds.containers": _SANDBOX,
    "proxima.process.limits": "names of calls that code may not make",
    "proxima.process.sandbox": _SANDBOX,
}
REMEDY = "add a function with a fallback to system.linux, or process.linux_process"
LINUX_CALLS = re.compile(
    r"fcntl|posix_fallocate|posix_fadvise|sched_\w+|pidfd_\w+|memfd_create|eventfd\w*|signalfd\w*|timerfd_\w+|inotify\w*"
    r"|epoll|EPOLL\w+|copy_file_range|splice|sendfile|unshare|setns|getrandom|O_(DIRECT|TMPFILE|PATH)|SO_PEERCRED|SIGRT\w+"
)
LINUX_FILES = re.compile(r"(/proc|/sys|/dev/shm)(/.*)?|\0.+")  # and sockets without a file, whose names begin with NUL

CLIENTS = "proxima.system.http_clients"
CLIENT_CALLS = re.compile(
    r"httpx\.(Async)?Client|httpx\.(get|post|put|head|stream|request)|urllib\.request\.\w+|urlopen|http\.client\.\w+"
    r"|requests\.(get|post|put|head|request|Session)|aiohttp\.ClientSession|websockets?\.\w*connect"
)
ALLOWED_CLIENTS = {"proxima_worlds.foreign_runner": "a server in the same process, without a socket"}

# Functions that open a file, each with the position of its mode; "open" as a method of a path has it first.
MODES = {"open": 1, "fdopen": 1, "NamedTemporaryFile": 0, "TemporaryFile": 0, "SpooledTemporaryFile": 1}
TEXT_BY_DEFAULT = ("open", "io.open", "os.fdopen")
TAKE_A_NAME = ("", "io", "codecs", "gzip", "bz2", "lzma")  # whose `open` is no method of a path
OPEN_NO_TEXT = ("os", "Image", "tarfile", "zipfile", "webbrowser")


def unspecified_encodings(path: str, nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the calls of a file that read or write text in the encoding of the locale."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if "encoding" in given or None in given:
            continue
        if _is_locale_text(node, given):
            yield f'{path}:{node.lineno}: {ast.unparse(node.func)} without encoding; add encoding="utf-8"'


def _is_locale_text(call: ast.Call, given: dict[str | None, ast.expr]) -> bool:
    if isinstance(call.func, ast.Attribute):
        owner = ast.unparse(call.func.value)
        name = call.func.attr
    else:
        owner = ""
        name = ast.unparse(call.func)
    if name in ("read_text", "write_text"):
        return len(call.args) == (name == "write_text")
    if name == "TextIOWrapper":
        return len(call.args) == 1
    if any(_is_true(given.get(word)) for word in ("text", "universal_newlines")):
        return True
    if name not in MODES or (name == "open" and owner in OPEN_NO_TEXT):
        return False
    of_path = name == "open" and owner not in TAKE_A_NAME
    at = 0 if of_path else MODES[name]
    mode = given.get("mode", call.args[at] if len(call.args) > at else None)
    if mode is None:
        if not (call.args or given):
            return of_path
        return ast.unparse(call.func) in TEXT_BY_DEFAULT
    return (
        isinstance(mode, ast.Constant)
        and isinstance(mode.value, str)
        and re.fullmatch(r"[rwaxt+]+", mode.value) is not None
    )


def linux_calls(path: str, nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the uses of what only Linux has."""
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and LINUX_FILES.fullmatch(node.value):
            yield f"{path}:{node.lineno}: {node.value!r} is of Linux; {REMEDY}"
        for name in names:
            if LINUX_CALLS.fullmatch(name):
                yield f"{path}:{node.lineno}: {name} is of Linux; {REMEDY}"


def http_clients(path: str, nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the clients of HTTP servers that a file makes."""
    for node in nodes:
        if isinstance(node, ast.Call) and CLIENT_CALLS.fullmatch(ast.unparse(node.func)):
            yield f"{path}:{node.lineno}: {ast.unparse(node.func)} may ask a proxy for this machine; use {CLIENTS}"


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True
