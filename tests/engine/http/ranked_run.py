"""Servers in processes of their own, and runs of several ranks that generate at them."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.warm import LAUNCHER, WarmPopen

LONG = 240.0  # seconds in which something must happen


class ServerProgram:
    """`model_server` on a port of its own, to be killed and started again."""

    def __init__(self, folder: Path, model: Path, port: int) -> None:
        self.log, self.model, self.port = folder / f"server-{port}.log", model, port
        self.url = f"http://127.0.0.1:{port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns at once."""
        command = [sys.executable, "-m", "tests.engine.http.model_server", "serve", str(self.model)]
        with self.log.open("ab") as log:
            self.process = WarmPopen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port)], stdout=log, stderr=log
            )

    def wait(self) -> "ServerProgram":
        """Until it answers."""
        until(lambda: answers(self.url), self.log)
        return self

    def kill(self) -> None:
        """With SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def answers(url: str) -> bool:
    """Whether a server is healthy."""
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as response:
        return bool(response.status == 200)
    return False


def until(condition: Any, log: Path, seconds: float = LONG) -> Any:
    """What the condition gives, once that is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-6000:]
        time.sleep(0.05)
    return value


class RankedRun:
    """`proxima train ... placement=torchrun` on some ranks, in the background."""

    def __init__(self, folder: Path, words: list[str], ranks: int = 2) -> None:
        self.folder, self.log = folder, folder.with_suffix(".log")
        command = [*LAUNCHER, "--nproc-per-node", str(ranks), "--standalone", "-m", "proxima.cli.main", "train", *words]
        with self.log.open("wb") as log:
            self.process = WarmPopen(
                [*command, "placement=torchrun", f"folder={folder}"],
                stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip

    def steps(self) -> list[dict[str, Any]]:
        """The metrics so far."""
        file = self.folder / "metrics.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [record for record in records if record["kind"] == "train"]

    def until(self, condition: Callable[[list[dict[str, Any]]], Any]) -> None:
        """Wait until the metrics of the steps, of which there is one, are so."""

        def holds() -> bool:
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-6000:]
            steps = self.steps()
            return bool(steps and condition(steps))

        until(holds, self.log)

    def kill(self) -> None:
        self.process.terminate()  # the launcher ends the ranks, which are in sessions of their own
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(40)
        self.process.kill()
        self.process.wait()
