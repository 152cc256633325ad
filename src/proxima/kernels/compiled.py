"""Compiles a C++ file once per machine, and keeps the library in the user's cache folder.

A file takes half a second to a second and a half, on first use. Whether a machine has kernels depends on its processor
and compiler, never on whether they have been compiled before: a resumed run takes the same path as before. `CXX=none`
switches them off.
"""

import ctypes
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from proxima.data import UserError
from proxima.data.machine import cache_folder, compiler, processor_flags

VECTORS = ("-march=native", "-mprefer-vector-width=512", "-Wno-psabi")
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", *VECTORS)
OLDEST = 12  # the oldest GCC that supports the vectors used here
PRODUCTS = "avx512_bf16"  # instructions that multiply bf16
TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_long, "f": ctypes.c_float, "d": ctypes.c_double}


@cache
def unavailable(instructions: str | None = None) -> str | None:
    """The reason why this machine has no kernels, or none with these instructions (Linux names); None if it has."""
    command = compiler()
    if not command:
        named = os.environ.get("CXX") or "g++"
        return "CXX=none" if named == "none" else f"no C++ compiler {named}"
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
    except RuntimeError:
        return "the user has no home folder; set XDG_CACHE_HOME"
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return f"{place} can't be written: {error.strerror}"


def kernels_in_words() -> str:
    """Describe in words what a bfloat16 run on this CPU computes with."""
    if (reason := unavailable()) is not None:
        return f"eager torch ({reason})"
    place, *more = compiler()
    made = f"compiled by {' '.join([Path(place).name, *more])} {_said(place, *more, '-dumpversion').strip()}"
    if (reason := unavailable(PRODUCTS)) is not None:
        return f"{made}, for training alone ({reason})"
    return f"{made}{' with AMX' if has_tiles() else ''}"


@cache
def library(source: Path, *more: str) -> ctypes.CDLL:
    """Compile `source` with FLAGS and `more`, or load it from the cache, keyed by its text, the headers in its folder,
    flags, compiler and processor. To be called only if `unavailable()` is None.

    Raises:
        UserError: it does not compile (the compiler's message is included), or the result can't be loaded.
    """
    command = compiler()
    texts = [file.read_text() for file in (source, *sorted(source.parent.glob("*.h")))]
    facts = (texts, FLAGS, more, _said(*command, "--version"), sorted(processor_flags()))
    held = folder() / f"{source.stem}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"
    with suppress(OSError):  # missing, or damaged, for example by a crash of the machine
        return ctypes.CDLL(str(held))
    held.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder()) as scratch:
        made = Path(scratch) / held.name
        _announce()
        done = subprocess.run([*command, *FLAGS, *more, str(source), "-o", made], capture_output=True, text=True)
        if done.returncode:
            failed = (
                f"{' '.join(command)} can't compile {source.name}; set CXX=none to run without: {done.stderr[-2000:]}"
            )
            raise UserError(failed)
        made.replace(held)  # atomic: another process may do the same
    try:
        return ctypes.CDLL(str(held))
    except OSError as error:
        raise UserError(f"{held} can't be loaded; set CXX=none to run without: {error}") from error


def functions(of: ctypes.CDLL, arguments: Mapping[str, str]) -> dict[str, Callable[..., None]]:
    """The functions of a library by name. They run on as many threads as torch; the number is their last argument.

    Args:
        arguments: the types of each function's other arguments: p a tensor or None, n a number, f a float, d a double.
    """

    def bound(name: str, kinds: str) -> Callable[..., None]:
        function = getattr(of, name)
        function.argtypes, function.restype = [*(TYPES[kind] for kind in kinds), ctypes.c_int], None

        def call(*values: Tensor | float | None) -> None:
            pointers = [each.data_ptr() if isinstance(each, Tensor) else each for each in values]
            function(*pointers, torch.get_num_threads())

        return call

    return {name: bound(name, kinds) for name, kinds in arguments.items()}


@cache
def has_tiles() -> bool:
    """Return True if this process may use the tiles of AMX; asks Linux for permission."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return "amx_bf16" in processor_flags() and not ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data)


def folder() -> Path:
    """The folder of the compiled libraries."""
    return cache_folder("kernels")


@cache
def _announce() -> None:
    print("compiling C++ for this processor, once: about a second a file", file=sys.stderr, flush=True)


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout
