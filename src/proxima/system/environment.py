"""environment.json: the versions and the machine behind the numbers of a run."""

import platform
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from proxima.system.machine import memory_bytes, processor_name, usable_cores
from proxima.version import __version__

LIBRARIES = ("torch", "transformers", "peft", "tokenizers", "datasets", "numpy", "pyarrow", "safetensors")
PACKAGES = (*LIBRARIES, "vllm", "sglang", "ray")  # engines and clusters


def describe_environment(seed: int, model: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Versions of the installed packages, machine, threads, seed and facts about the weights (path, revision, sha256,
    parameters)."""
    import torch

    cuda = torch.cuda.is_available()
    compiled = sys.modules.get("proxima.kernels.compiled")  # None: nothing that is loaded needs kernels
    return {
        "proxima": __version__,
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := package_version(name)) is not None},
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "processor": processor_name(),
            "cores": usable_cores(),
            "memory_bytes": memory_bytes()[0],
        },
        "torch": {
            "threads": torch.get_num_threads(),
            "interop_threads": torch.get_num_interop_threads(),
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else ["cpu"],
            "cuda": torch.version.cuda,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        },
        "kernels": None if compiled is None else compiled.kernels_in_words(),
        "seed": seed,
        "model": dict(model or {}),
        "command": " ".join(Path(word).name if i == 0 else word for i, word in enumerate(sys.argv)),
    }


@cache  # reading a package's metadata takes a millisecond, and a run asks for a dozen
def package_version(name: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
