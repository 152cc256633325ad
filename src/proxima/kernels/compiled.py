"""Compiles a C++ file once per machine, and keeps the library in the user's cache folder.

A file takes half a second to a second and a half, on first use. Whether a machine has kernels depends on its processor
and compiler, never on whether they have been compiled before: a resumed run takes the same path as before. `CXX=none`
switches them off. The variables that keep torch from a processor's wider vectors keep the kernels from them too.

A kept library ends with the SHA-256 of the bytes before it, which the system's loader ignores: a damaged one would end
the process with a signal.
"""

import ctypes
import hashlib
import os
import platform
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from proxima.data import UserError
from proxima.system.atomic_files import flush_to_disk
from proxima.system.machine import cache_folder, compiler, processor_flags, withheld_flags

VECTORS = ("-march=native", "-mprefer-vector-width=512", "-Wno-psabi")
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", *VECTORS)
WITHOUT = {  # features by their names in Linux, and how the compiler leaves them out, with all that needs them
    "amx_bf16": "-mno-amx-bf16",
    "amx_tile": "-mno-amx-tile",
    "avx": "-mno-avx",
    "avx512_bf16": "-mno-avx512bf16",
    "avx512f": "-mno-avx512f",
}
SECONDS = 300  # that the compiler may take
DIGEST = hashlib.sha256
OLDEST = 12  # the oldest GCC that supports the vectors used here
PRODUCTS = "avx512_bf16"  # instructions that multiply bf16
TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_long, "f": ctypes.c_float, "d": ctypes.c_double}


@cache
def unavailable(instructions: str | None = None) -> str | None:
    """The reason why this machine has no kernels, or none with these instructions (Linux names); None if it has.

    Raises:
        UserError: the compiler hangs.
    """
    command = compiler()
    if not command:
        named = os.environ.get("CXX") or "g++"
        if named == "none":
            return "CXX=none"
        return f"no C++ compiler {named}"
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"{platform.system()} on {platform.machine()}"
    if instructions is not None and instructions not in processor_flags():
        return f"a processor without {instructions}"
    macros = _said(*command, "-dM", "-E", "-x", "c++", os.devnull)  # Clang says 4
    version = re.search(r"#define __GNUC__ (\d+)", macros)
    if version is None or int(version[1]) < OLDEST:
        return f"{' '.join(command)} is not GCC {OLDEST} or later"
    try:
        place = folder()
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return None
    except RuntimeError:
        return "the user has no home folder; set XDG_CACHE_HOME"
    except OSError as error:
        return f"{place} can't be written: {error.strerror}"


def kernels_in_words() -> str:
    """Describe in words what a bfloat16 run on this CPU computes with."""
    reason = unavailable()
    if reason is not None:
        return f"eager torch ({reason})"
    place, *more = compiler()
    made = f"compiled by {' '.join([Path(place).name, *more])} {_said(place, *more, '-dumpversion').strip()}"
    reason = unavailable(PRODUCTS)
    if reason is not None:
        return f"{made}, for training alone ({reason})"
    if has_tiles():
        return f"{made} with AMX"
    return made


@cache
def library(source: Path, *more: str) -> ctypes.CDLL:
    """Compile `source` with FLAGS and `more`, for what this process may use of the processor, or load it from the
    cache, keyed by its text, the headers in its folder, flags, compiler and processor. To be called only if
    `unavailable()` is None.

    Raises:
        UserError: it does not compile (the compiler's message is included), the compiler hangs, or the result can't be
            stored or loaded.
    """
    command = compiler()
    withheld = withheld_flags()
    flags = (*FLAGS, *(option for feature, option in WITHOUT.items() if feature in withheld))
    texts = [file.read_text(encoding="utf-8") for file in (source, *sorted(source.parent.glob("*.h")))]
    facts = (texts, flags, more, _said(*command, "--version"), sorted(processor_flags()), DIGEST.__name__)
    held = folder() / f"{source.stem}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"
    fault = _fault(held)
    if fault is None:
        with suppress(OSError):
            return ctypes.CDLL(str(held))
        fault = "can't be loaded"
    if fault:
        print(f"{held} {fault}: compiling it again", file=sys.stderr, flush=True)
    else:
        _announce()
    try:
        _compile(command, (*flags, *more), source, held)
        return ctypes.CDLL(str(held))
    except OSError as error:
        raise UserError(f"{held} can't be stored or loaded; set CXX=none to run without: {error}") from error


def _fault(held: Path) -> str | None:
    """Why a kept library can't be used, in words; empty if there is none, None if it can."""
    try:
        facts = held.lstat()
        if not stat.S_ISREG(facts.st_mode):  # a link, or a pipe, whose other end a read would wait for
            return "is not a file"
        if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return "can be changed by other users"
        content = held.read_bytes()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"can't be read ({error.strerror})"
    size = DIGEST().digest_size
    if DIGEST(content[:-size]).digest() == content[-size:]:
        return None
    return "is damaged"


def _compile(command: tuple[str, ...], flags: Sequence[str], source: Path, held: Path) -> None:
    """Compile a file; `held` appears once all of it is on the disk, since another process may read it at any time.

    Raises:
        UserError: it does not compile.
        OSError: it can't be stored.
    """
    held.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=held.parent) as scratch:
        made = Path(scratch) / held.name
        done = _run(*command, *flags, str(source), "-o", str(made))
        if done.returncode:
            what = f"{' '.join(command)} can't compile {source.name}; set CXX=none to run without"
            raise UserError(f"{what}: {done.stderr[-2000:]}")
        with made.open("ab") as file:
            file.write(DIGEST(made.read_bytes()).digest())
            os.fchmod(file.fileno(), 0o644)
            file.flush()
            os.fsync(file.fileno())
        made.replace(held)
    flush_to_disk(held.parent)


def functions(of: ctypes.CDLL, arguments: Mapping[str, str]) -> dict[str, Callable[..., None]]:
    """The functions of a library by name. They run on as many threads as torch; the number is their last argument.

    Args:
        arguments: the types of each function's other arguments: p a tensor or None, n a number, f a float, d a double.
    """

    def bound(name: str, kinds: str) -> Callable[..., None]:
        function = getattr(of, name)
        function.argtypes = [*(TYPES[kind] for kind in kinds), ctypes.c_int]
        function.restype = None

        def call(*values: Tensor | float | None) -> None:
            pointers = [each.data_ptr() if isinstance(each, Tensor) else each for each in values]
            function(*pointers, torch.get_num_threads())

        return call

    return {name: bound(name, kinds) for name, kinds in arguments.items()}


@cache
def has_tiles() -> bool:
    """Return True if this process may use the tiles of AMX; asks Linux for permission."""
    arch_prctl = 158
    request_permission = 0x1023
    tile_data = 18
    return "amx_bf16" in processor_flags() and not ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data)


def folder() -> Path:
    """The folder of the compiled libraries."""
    return cache_folder("kernels")


@cache
def _announce() -> None:
    print("compiling C++ for this processor (once, about a second per file)", file=sys.stderr, flush=True)


def _said(*command: str) -> str:
    return _run(*command).stdout


def _run(*command: str) -> "subprocess.CompletedProcess[str]":
    """Run the compiler; UserError if it hangs. It and all that it started then end."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=SECONDS)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                reason = f"{' '.join(command[:2])} did not end within {SECONDS:g} s"
                raise UserError(reason, remedy="repair the compiler, or set CXX=none to run without") from None
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, errors)
