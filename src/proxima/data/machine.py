"""This machine's processor, C++ compiler, web server packages, and a cache folder."""

import importlib.util
import os
import platform
import shutil
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")  # of Linux
SERVER_REMEDY = "pip install 'proxima-rl[serve]'"


def compiler() -> tuple[str, ...]:
    """The words of $CXX (a path, or a command such as `ccache g++`), or of g++, with the full path; empty if not
    found."""
    named = os.environ.get("CXX") or "g++"
    words = [named] if shutil.which(named) else named.split()
    place = shutil.which(words[0]) if words else None
    return () if place is None else (place, *words[1:])


def missing_for_server() -> str:
    """The packages of a web server that are not installed, for a message with `SERVER_REMEDY`; empty if all are
    installed."""
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
    """The processor's features, by their names in Linux; empty on other systems."""
    return frozenset(_said("flags").split())


def _said(field: str) -> str:
    """The value of a field of `/proc/cpuinfo` for the first core; empty on other systems."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
