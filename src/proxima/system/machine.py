"""This machine: its entry in `environment.json` and the versions there, processor, memory, compiler, cache folder."""

import importlib.util
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

from proxima.version import __version__

CPUINFO = Path("/proc/cpuinfo")  # of Linux
SERVER_REMEDY = "pip install 'proxima-rl[serve]'"
LIBRARIES = ("torch", "transformers", "peft", "tokenizers", "datasets", "numpy", "pyarrow", "safetensors")
PACKAGES = (*LIBRARIES, "vllm", "sglang", "ray")  # engines and clusters
# of x86-64, from SSE4.1 up: how Linux begins the names of the features that a level adds
LEVELS: tuple[tuple[str, ...], ...] = (
    (),
    ("avx", "f16c", "fma", "vaes", "vpclmulqdq"),
    ("avx512",),
    ("avx512_bf16",),
    ("amx",),
)
CEILINGS = {  # the level up to which torch and oneDNN use a processor; with any other value, all of it
    "ATEN_CPU_CAPABILITY": {"default": 0, "avx2": 1},
    "ONEDNN_MAX_CPU_ISA": {
        "sse41": 0,
        "avx": 0,
        "avx2": 1,
        "avx2_vnni": 1,
        "avx2_vnni_2": 1,
        "avx512_core": 2,
        "avx512_core_vnni": 2,
        "avx512_core_bf16": 3,
        "avx512_core_fp16": 3,
    },
}


def describe_environment(seed: int, model: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Versions of the installed packages, machine, threads, seed and facts about the weights (path, revision, sha256,
    parameters)."""
    import torch

    devices = ["cpu"]
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = {name: package_version(name) for name in PACKAGES}
    compiled = sys.modules.get("proxima.kernels.compiled")  # None: nothing that is loaded needs kernels
    kernels = None if compiled is None else compiled.kernels_in_words()
    words = list(sys.argv)
    if words:
        words[0] = Path(words[0]).name
    return {
        "proxima": __version__,
        "python": platform.python_version(),
        "packages": {name: version for name, version in versions.items() if version is not None},
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "processor": processor_name(),
            "cores": usable_cores(),
            "memory_bytes": memory_bytes()[0],
        },
        "torch": {
            "threads": torch.get_num_threads(),
            "interop_threads": torch.get_num_interop_threads(),
            "devices": devices,
            "cuda": torch.version.cuda,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        },
        "kernels": kernels,
        "seed": seed,
        "model": dict(model or {}),
        "command": " ".join(words),
    }


@cache  # reading a package's metadata takes a millisecond, and a run asks for a dozen
def package_version(name: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


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
    """The processor's features that this process may use, by their names in Linux; empty on other systems."""
    return frozenset(_said("flags").split()) - withheld_flags()


def withheld_flags() -> frozenset[str]:
    """The processor's features that torch is told to leave unused, by $ATEN_CPU_CAPABILITY or $ONEDNN_MAX_CPU_ISA."""
    highest = len(LEVELS)
    for variable, levels in CEILINGS.items():
        value = os.environ.get(variable, "").lower()
        highest = min(highest, levels.get(value, highest))
    beyond = tuple(chain.from_iterable(LEVELS[highest + 1 :]))
    return frozenset(flag for flag in _said("flags").split() if flag.startswith(beyond))


def usable_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_compute_threads(asked: int) -> None:
    """Set torch's threads in this process. 0: where several ranks run on this machine, its part of the usable cores, as
    torchrun and Ray set $OMP_NUM_THREADS to 1 for any number of cores; else torch's own number. More than 1 in
    $OMP_NUM_THREADS is somebody's choice, and stays."""
    import torch

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if asked == 0 and ranks > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        asked = max(1, usable_cores() // ranks)
    torch.set_num_threads(asked or torch.get_num_threads())


def memory_bytes() -> tuple[int | None, int | None]:
    """Total and available memory of the machine, within the limits of its cgroup if it has one; None if the system does
    not report them."""
    try:
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        total = _kibibytes(facts["MemTotal"])
        free = _kibibytes(facts["MemAvailable"])
    except (OSError, KeyError, ValueError):
        return None, None
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return total, free
    return min(total, limit), min(free, limit - used)


def _kibibytes(text: str) -> int:
    """The bytes of `  16384 kB`."""
    return int(text.split()[0]) * 1024


def peak_memory_bytes() -> int:
    """The most memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def gemm_rate(dtype: str, device: str = "cpu", size: int = 0, seconds: float = 0.2) -> float:
    """Measure the FLOP/s of `size`³ matrix products in `dtype`, the best of several; takes about `seconds`. 0: a size
    that fills the device."""
    import torch

    if size == 0:
        size = 4096 if device.startswith("cuda") else 1024
    kind = getattr(torch, dtype)
    a, b = (torch.linspace(-1, 1, size * size, device=device).view(size, size).to(kind) for _ in range(2))

    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    torch.mm(a, b)  # loads the library, and generates code for the shapes
    wait()
    least = float("inf")
    end = time.perf_counter() + seconds
    while True:
        began = time.perf_counter()
        torch.mm(a, b)
        wait()
        now = time.perf_counter()
        least = min(least, now - began)
        if now >= end:
            return 2 * size**3 / least


def _said(field: str) -> str:
    """The value of a field of `/proc/cpuinfo` for the first core; empty on other systems."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
