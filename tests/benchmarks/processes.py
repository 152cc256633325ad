"""What benchmarks start as `python -m MODULE` or `python FILE`, forked from a process that has imported torch."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [
    "transformers",
    "proxima.runtime.launch.run",
    "proxima.runtime.launch.offline_workload",
    "proxima.cli.main",
]


def child(command: list[str], environment: dict[str, str], ends: tuple[Connection, Connection], log: str) -> None:
    """Run the program of a command line with these ends as its stdin and stdout."""
    for end, stream in zip(ends, (0, 1), strict=True):
        os.dup2(end.fileno(), stream)
        end.close()
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(os.dup(i), mode) for i, mode in ((0, "r"), (1, "w"), (2, "w")))
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    code = 1
    try:
        *_, program = command[1:2] if command[1] != "-m" else command[2:3]
        sys.argv = [program, *command[command.index(program) + 1 :]]
        (runpy.run_path if program.endswith(".py") else runpy.run_module)(program, run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


class Forked:
    """As `subprocess.Popen` of a Python program, with pipes."""

    def __init__(self, command: list[str], *, log: Path, env: Any = None) -> None:
        CONTEXT.set_forkserver_preload(PRELOADED)
        inner_in, self.outer_in = CONTEXT.Pipe(duplex=False)
        self.outer_out, inner_out = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=child, args=(command, dict(env or {}), (inner_in, inner_out), str(log)))
        self.process.start()
        inner_in.close()
        inner_out.close()
        self.stdin, self.stdout = (
            os.fdopen(os.dup(end.fileno()), mode) for end, mode in ((self.outer_in, "w"), (self.outer_out, "r"))
        )
        self.outer_in.close()
        self.outer_out.close()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a side", timeout or 0)
        self.stdout.close()
        return self.process.exitcode

    def kill(self) -> None:
        """At once."""
        self.process.kill()


class Subprocess:
    """The part of the module `subprocess` that benchmarks use."""

    PIPE, CalledProcessError, TimeoutExpired = subprocess.PIPE, subprocess.CalledProcessError, subprocess.TimeoutExpired

    def __init__(self, log: Path) -> None:
        self.log = log
        self.started: list[Forked] = []

    def Popen(self, command: list[str], *, stderr: Any, env: Any = None, **_: Any) -> Forked:
        """A side of a benchmark."""
        self.started.append(Forked(command, log=Path(stderr.name), env=env))
        return self.started[-1]

    def end(self) -> None:
        """No process outlives its test."""
        for one in self.started:
            one.kill()
            one.process.join()

    def run(self, command: list[str], *, env: Any = None, check: bool = False, **_: Any) -> Any:
        """A run to its end."""
        self.started.append(process := Forked(command, log=self.log, env=env))
        process.stdin.close()
        text = process.stdout.read()
        done = subprocess.CompletedProcess(command, process.wait(), text, "")
        if check and done.returncode:
            raise RuntimeError(f"{command} ended with {done.returncode}: {self.log.read_text()[-2000:]}")
        return done
