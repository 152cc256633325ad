"""What benchmarks start as `python -m MODULE` or `python FILE`, forked from a process that has imported torch."""

import subprocess
from pathlib import Path
from typing import Any

from tests.warm import LAUNCHER, ROOT, WarmPopen


class Subprocess:
    """The part of the module `subprocess` that benchmarks use."""

    PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL
    CalledProcessError, TimeoutExpired = subprocess.CalledProcessError, subprocess.TimeoutExpired

    def __init__(self, log: Path) -> None:
        self.log = log
        self.started: list[Any] = []

    def Popen(self, command: list[str], **options: Any) -> Any:
        """A side of a benchmark."""
        if command[1:3] == ["-m", "torch.distributed.run"]:
            command = [*LAUNCHER, *command[3:]]
        self.started.append(WarmPopen(command, **{"cwd": ROOT, **options}))
        return self.started[-1]

    def end(self) -> None:
        """No process outlives its test."""
        for process in self.started:
            process.kill()
            process.wait()

    def run(self, command: list[str], *, env: Any = None, check: bool = False, **_: Any) -> Any:
        """A run to its end."""
        with self.log.open("a") as log:
            process = self.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
        text, _ = process.communicate()
        done = subprocess.CompletedProcess(command, process.returncode, text, "")
        if check and done.returncode:
            raise RuntimeError(f"{command} ended with {done.returncode}: {self.log.read_text()[-2000:]}")
        return done
