"""Tiny runs in several real processes, by torchrun or one by one; none outlives its test."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.ports import kept_port
from tests.processes import eventually, with_word
from tests.runtime.tiny_run import changed, recipe
from tests.warm import LAUNCHER, WarmPopen

ROOT = Path(__file__).parents[3]
SECONDS = 240.0  # of a run, on a machine with other work
PATIENCE = 30  # seconds after which torchrun kills a rank that a SIGTERM did not end
PROXIMA = "proxima.cli.main"


def ranked(model: Path, folder: Path, **changes: Any) -> list[str]:
    """The words of a recipe on several ranks, which is written beside the folder."""
    tree = recipe(model, placement={"kind": "torchrun", "timeout": 600.0})
    file = folder.with_suffix(".yaml")
    file.write_text(json.dumps(changed(tree, changes)))
    return [str(file), f"folder={folder}"]


@contextmanager
def started(
    words: list[str], *, ranks: int = 2, output: Path, module: str = PROXIMA
) -> Iterator["subprocess.Popen[bytes]"]:
    """`torchrun` of the command; everything that it started is gone afterwards."""
    run = [*LAUNCHER, "--nproc-per-node", str(ranks), "--master-port", str(kept_port())]
    run += ["--shutdown-timeout", str(PATIENCE)]
    with output.open("wb") as file:
        process = WarmPopen(
            [*run, "-m", module, "train", *words], cwd=ROOT, env=environment(), stdout=file, stderr=file
        )
    try:
        yield process
    finally:
        end(words)
        process.wait(SECONDS)


def launched(words: list[str], *, ranks: int = 2, output: Path, module: str = PROXIMA) -> tuple[int, str]:
    """Exit code of torchrun, and what was printed before it said anything itself. No process is left."""
    with started(words, ranks=ranks, output=output, module=module) as process:
        code = process.wait(SECONDS)
        eventually(lambda: not processes(words), output)
    return code, ours(output)


def ours(output: Path) -> str:
    """What was printed before torchrun said anything."""
    lines = output.read_text().splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if line[:1] in "WE" and "torch/distributed/elastic" in line), None)
    return "".join(lines[:end])


def one_by_one(*commands: list[str]) -> list[tuple[int, str, str]]:
    """Ranks that no launcher has started, each with words of its own, as on nodes of their own: exit code, error output
    and output of each."""
    common = {"WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept_port())}
    common |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    running: list[subprocess.Popen[str]] = []
    for rank, words in enumerate(commands):
        env = environment() | common | {"RANK": str(rank), "GROUP_RANK": str(rank)}
        arguments = [sys.executable, "-m", PROXIMA, "train", *words]
        pipe = subprocess.PIPE
        running.append(WarmPopen(arguments, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True))
    ended: list[tuple[int, str, str]] = []
    try:
        for process in running:
            out, err = process.communicate(timeout=SECONDS)
            ended.append((process.returncode, err, out))
    except subprocess.TimeoutExpired:
        raise AssertionError(f"rank {len(ended)} goes on; before it: {ended}") from None
    finally:
        for process in running:
            process.kill()
    return ended


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


def processes(words: list[str]) -> list[int]:
    """Those that were started with the words."""
    return with_word("cmdline", words[-1])


def end(words: list[str]) -> None:
    for pid in processes(words):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
