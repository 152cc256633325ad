"""Show this machine: versions, threads, devices, free memory and disk, and the speed of matrix products."""

import platform
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from proxima.cli.parameters import AsJson, print_json
from proxima.data.errors import counted
from proxima.system.machine import gemm_rate, memory_bytes, package_version, usable_cores
from proxima.version import __version__

PACKAGES = ("torch", "transformers", "safetensors", "pyarrow", "pyyaml", "rich", "jinja2")
OPTIONAL = {
    "datasets": "data",
    "reasoning_gym": "gym",
    "math-verify": "math",
    "gguf": "gguf",
    "peft": "lora",
    "matplotlib": "plot",
    "torchao": "low-bit",
}


def doctor(*, as_json: AsJson = False) -> None:
    """Print the facts about this machine."""
    facts = describe_machine()
    print_json(facts) if as_json else print("\n".join(report_lines(facts)))


def describe_machine() -> dict[str, Any]:
    """All facts that `doctor` prints; sizes in bytes, rates in GFLOP/s."""
    import torch

    from proxima.kernels.compiled import kernels_in_words
    from proxima.model.precision import dtype_choice

    cuda = torch.cuda
    facts = [(cuda.get_device_name(i), cuda.get_device_properties(i).total_memory) for i in range(cuda.device_count())]
    devices = [{"name": f"cuda:{i}", "model": name, "memory_bytes": size} for i, (name, size) in enumerate(facts)]
    fastest = "cuda" if devices else "cpu"
    total, free = memory_bytes()
    choice = dtype_choice(fastest)
    gemm = {dtype: round(gemm_rate(dtype, fastest) / 1e9, 1) for dtype in ("float32", "bfloat16")}
    return {
        "proxima": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: package_version(name) for name in PACKAGES},
        "optional": {name: package_version(name) for name in OPTIONAL},
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "devices": devices,
        "memory_bytes": {"total": total, "free": free},
        "disk_free_bytes": shutil.disk_usage(Path.cwd()).free,
        "gemm_gflops": {"device": fastest, **gemm},
        "auto": asdict(choice),
        "kernels": kernels_in_words(),
    }


def report_lines(facts: dict[str, Any]) -> list[str]:
    """The facts as text, with a remedy for each that needs one."""
    packages = "  ".join(f"{name} {version or 'MISSING'}" for name, version in facts["packages"].items())
    installed = "  ".join(f"{name} {version}" for name, version in facts["optional"].items() if version)
    missing = [f'{name} (pip install "proxima-rl[{OPTIONAL[name]}]")' for name, v in facts["optional"].items() if not v]
    devices = ", ".join(f"{d['name']} {d['model']} {d['memory_bytes'] / 2**30:.0f} GiB" for d in facts["devices"])
    memory = facts["memory_bytes"]
    gemm = facts["gemm_gflops"]
    shown = "unknown"
    if memory["total"] is not None:
        shown = f"{memory['free'] / 2**30:.1f} GiB free of {memory['total'] / 2**30:.1f}"
    one = ", x W"
    layer = ""
    if gemm["device"] == "cpu":  # two measurements, which may differ
        one = f", x W alone, on {counted(facts['threads'], 'thread')}"
        layer = " (the products of a layer, forward and backward, on one core; this decides, not gemm)"
    report = [
        f"proxima   {facts['proxima']}  python {facts['python']}  {facts['system']}",
        f"packages  {packages}",
        f"optional  {installed or 'none'}",
    ]
    if missing:
        report.append(f"          not installed: {', '.join(missing)}")
    report += [
        f"cores     {facts['cores']}, torch uses {facts['threads']} threads",
        f"devices   {devices or 'cpu only'}",
        f"memory    {shown}",
        f"disk      {facts['disk_free_bytes'] / 2**30:.1f} GiB free here",
        f"kernels   bfloat16 on a CPU: {facts['kernels']}",
        f"gemm      float32 {gemm['float32']:,.4g}  bfloat16 {gemm['bfloat16']:,.4g} GFLOP/s on {gemm['device']}{one}",
        f"auto      {facts['auto']['dtype']} for every dtype that is auto: {facts['auto']['reason']}{layer}",
    ]
    return report


COMMAND = doctor
