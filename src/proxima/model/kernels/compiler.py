"""Compiles C++ once a machine, in seconds, and keeps the library on disk.

Whether there are kernels depends on the machine alone (a C++ compiler, its flags), never on when they were compiled: a
run that resumes takes the path that it took. `CXX=none` switches them off.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

FLAGS = (
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-std=c++17",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-Wno-psabi",
)


@cache
def find_compiler() -> str | None:
    """The C++ compiler, $CXX or g++; None without one that is GCC 12 or later on Linux, on an x86."""
    path = shutil.which(os.environ.get("CXX") or "g++")
    if path is None or platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    found = subprocess.run([path, "-dumpversion"], capture_output=True, text=True)
    version = found.stdout.split(".")[0].strip()
    return path if version.isdigit() and int(version) >= 12 else None


def compiled(source: Path, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The library of a source, compiled unless it is there; by what it and the headers beside it say, the flags, the
    compiler and the processor.

    Raises:
        RuntimeError: there is no compiler, or it does not compile it.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError(f"there is no compiler for {source.name}")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    processor = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    texts = [file.read_text() for file in (source, *sorted(source.parent.glob("*.h")))]
    key = hashlib.sha256(repr((texts, FLAGS, flags, version, processor)).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "proxima" / "kernels"
    library = folder / f"{source.stem}-{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            done = subprocess.run(
                [compiler, *FLAGS, *flags, str(source), "-o", str(made)], capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"{compiler} does not compile {source.name}: {done.stderr.strip()}")
            made.replace(library)
    return ctypes.CDLL(str(library))
