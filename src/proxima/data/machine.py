"""What this machine has: its processor, a C++ compiler, a web server, and a folder for what can be made again."""

import importlib.util
import os
import platform
import shutil
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")  # of Linux
SERVER_REMEDY = "pip install 'proxima-rl[serve]'"


def compiler() -> tuple[str, ...]:
    """The words of $CXX, a place or a command as `ccache g++`, or g++, where that is; nothing where it is not."""
    named = os.environ.get("CXX") or "g++"
    words = [named] if shutil.which(named) else named.split()
    place = shutil.which(words[0]) if words else None
    return () if place is None else (place, *words[1:])


def missing_for_server() -> str:
    """The packages of a web server that are not installed, for a message with `SERVER_REMEDY`; empty if none is."""
    return " and ".join(name for name in ("uvicorn", "starlette") if importlib.util.find_spec(name) is None)


def cache_folder(name: str) -> Path:
    """`name` in the user's cache folder.

    Raises:
        RuntimeError: the user has no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "proxima" / name


def processor_name() -> str:
    """The model of the processor."""
    return _said("model name") or platform.processor() or platform.machine()


def processor_flags() -> frozenset[str]:
    """What the processor can do, as Linux names it; nothing elsewhere."""
    return frozenset(_said("flags").split())


def _said(field: str) -> str:
    """What Linux says of the first core; nothing elsewhere."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
