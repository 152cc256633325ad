"""Shared by all claims: peer environments, alternating sides, medians, the machine, the table and the JSON line."""

import argparse
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / ".cache" / "benchmarks"
LOAD_AT_START = os.getloadavg()[0]


def parser(doc: str | None, *, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with the options common to all claims."""
    p = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    p.add_argument(
        "--model",
        default=str(HERE.parent / "models" / "smollm2-135m-instruct"),
        help="Hugging Face folder (default: the demo's)",
    )
    p.add_argument("--repeats", type=int, default=repeats, help="measurements of each side (default: %(default)s)")
    p.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="torch threads of each side (default: %(default)s)",
    )
    p.add_argument("--json-out", type=Path, help="also write the result as a file")
    return p


def need_model(path: str) -> str:
    """Return the model folder, after downloading the demo's model into it if it has no config.json."""
    if not (Path(path) / "config.json").is_file():
        from proxima.model.demo_model import download_demo_model

        download_demo_model(Path(path))
    return path


def peer_python(folder: Path) -> str:
    """Return an interpreter with the versions of `folder`/peer.lock: this one if it has them all, else that of an
    environment created once below .cache/."""
    lock = folder / "peer.lock"
    pins = dict(line.split("==") for line in lock.read_text(encoding="utf-8").split() if "==" in line)
    if all(_version(name) == version for name, version in pins.items()):
        return sys.executable
    place = CACHE / f"{folder.name}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:8]}"
    python = place / "bin" / "python"
    if not (place / "ready").exists():
        print(f"making the peer's environment in {place.relative_to(HERE.parent)}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--requirement", str(lock)], check=True)
        (place / "ready").touch()
    return str(python)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


class Side:
    """A process that measures on request and sleeps otherwise."""

    def __init__(
        self,
        name: str,
        module: str,
        settings: Mapping[str, Any],
        *,
        threads: int,
        python: str = sys.executable,
        source: Path | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name = name
        CACHE.mkdir(parents=True, exist_ok=True)
        self.log = CACHE / f"{module}.log"
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        if source is not None:  # another version of proxima
            environment["PYTHONPATH"] = str(source)
        environment |= variables
        self.process = subprocess.Popen(
            [python, "-m", f"benchmarks.{module}", json.dumps(dict(settings))],
            cwd=HERE.parent,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w", encoding="utf-8"),
            encoding="utf-8",
            errors="replace",
        )
        self.about = self._read()

    def once(self) -> dict[str, Any]:
        """Take one measurement."""
        assert self.process.stdin is not None
        self.process.stdin.write("{}\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            tail = "".join(self.log.read_text(encoding="utf-8").splitlines(keepends=True)[-15:])
            raise RuntimeError(f"{self.name} ended without an answer; the end of {self.log}:\n{tail}")
        return json.loads(line)

    def close(self) -> None:
        """Stop the process by closing its stdin; kill it if it is still running after 30 s."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def alternate(sides: Sequence[Side], repeats: int, *, discard: int = 1) -> dict[str, list[dict[str, Any]]]:
    """Measure each side `repeats` times in turn, after `discard` discarded rounds, and close the sides."""
    by_side: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    try:
        for i in range(discard + repeats):
            for side in sides:
                measured = side.once()
                print(
                    f"  {'discarded ' if i < discard else ''}{side.name}: {json.dumps(measured)}",
                    file=sys.stderr,
                    flush=True,
                )
                if i >= discard:
                    by_side[side.name].append(measured)
    finally:
        for side in sides:
            side.close()
    return by_side


class Spread:
    """The median and range of some measurements."""

    def __init__(self, values: Sequence[float]) -> None:
        self.median, self.low, self.high = statistics.median(values), min(values), max(values)

    def text(self, form: str = ",.0f") -> str:
        return f"{self.median:{form}} [{self.low:{form}}-{self.high:{form}}]"

    def json(self) -> list[float]:
        return [round(x, 4) for x in (self.median, self.low, self.high)]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, aligned for a terminal."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def machine() -> dict[str, Any]:
    """Return the processor, cores, memory, GPUs if there are any, and the load before the sides started."""
    from proxima.system.machine import describe_environment

    environment = describe_environment(0)
    gpus = [name for name in environment["torch"]["devices"] if name != "cpu"]
    return environment["machine"] | ({"gpus": gpus} if gpus else {}) | {"load_at_start": round(LOAD_AT_START, 2)}


def result_name() -> str:
    """Return the file name of a result of today on this machine, `2026-11-22_2-cores.json`, plus the name of a GPU."""
    here = machine()
    if "gpus" in here:
        gpu = re.sub(r"[^a-z0-9]+", "-", here["gpus"][0].lower())
    else:
        gpu = ""
    return f"{date.today()}_{here['cores']}-cores{gpu and f'_{gpu}'}.json"


def versions() -> dict[str, str]:
    """Return this side's versions; a peer reports its own in `about`."""
    from proxima.version import __version__

    return {"proxima": __version__} | {
        name: version for name in ("torch", "transformers") if (version := _version(name))
    }


def commit() -> str:
    """Return the measured commit, with `+` if the tree has changes."""
    words = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        described = subprocess.run(words, cwd=HERE, capture_output=True, encoding="utf-8", errors="replace", check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def finish(result: dict[str, Any], out: Path | None) -> None:
    """Print the result as the last line, and write it to `out` if given."""
    result = result | {"machine": machine(), "versions": versions() | result.get("versions", {}), "commit": commit()}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def gemm_rate(threads: int, dtype: str, size: int = 2048, repeats: int = 5) -> float:
    """Return the best FLOP/s of some square matrix products in this process: the current limit of the machine or its
    GPU."""
    import torch

    from benchmarks.side import clock, device

    torch.set_num_threads(threads)
    size *= 4 if device() == "cuda" else 1
    a, b = (torch.randn(size, size, dtype=getattr(torch, dtype), device=device()) for _ in range(2))
    best = float("inf")
    for _ in range(repeats + 1):
        start = clock()
        torch.mm(a, b)
        best = min(best, clock() - start)
    return 2 * size**3 / best


def command(main: Callable[[], None]) -> None:
    """Run a claim's main and report its errors in one line instead of a traceback."""
    try:
        main()
    except (RuntimeError, ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
