"""Commands of a container engine that a run waits for, such as a pull: one line shows how far they are."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import TextIO

from proxima.process.children import ENDS_WITH_US, kill_group

TICK = 1.0  # seconds between two changes of the line on a terminal
NEWS = 10.0  # seconds between two lines elsewhere, as in a log
CLEAR = "\r\033[K"  # the current line of a terminal


def run_shown(
    command: Sequence[str],
    seconds: float,
    stream: TextIO | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Run a command for at most `seconds`, showing on standard error that the run waits for it, for how long, and what
    it said last; return its exit code and its last line, or how long it took.

    Args:
        stream: in place of standard error.
        environment: of the command; None: this process's.
    """
    waiting = _WaitingLine(_short(command), stream or sys.stderr)
    late = threading.Event()

    def kill() -> None:
        late.set()
        kill_group(process.pid)

    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        encoding="utf-8",
        errors="replace",
        **ENDS_WITH_US,
    ) as process:
        timer = threading.Timer(seconds, kill)
        timer.start()
        waiting.begin()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                waiting.said = line.strip() or waiting.said
        except BaseException:
            kill_group(process.pid)
            raise
        finally:
            timer.cancel()
            waiting.end()
    said = waiting.said[:500]
    if late.is_set():
        said = f"took longer than {seconds:g} s"
    return process.returncode, said


class _WaitingLine:
    """A line that moves on a terminal; elsewhere a line at the beginning, one from time to time, and one at the end.

    Attributes:
        said: the last line of the command.
    """

    def __init__(self, name: str, stream: TextIO) -> None:
        self.name = name
        self.said = ""
        self._stream = stream
        self._live = stream.isatty()
        self._began = monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def begin(self) -> None:
        self._write()
        self._thread.start()

    def end(self) -> None:
        """Leave the last line."""
        self._over.set()
        self._thread.join()
        self._write()
        if self._live:
            print(file=self._stream, flush=True)

    def _tick(self) -> None:
        seconds = TICK if self._live else NEWS
        while not self._over.wait(seconds):
            self._write()

    def _write(self) -> None:
        text = f"the run waits for: {self.name}  {monotonic() - self._began:.0f} s  {self.said}".rstrip()
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print(CLEAR + text[:width], end="", file=self._stream, flush=True)
        else:
            print(text[:200], file=self._stream, flush=True)


def _short(command: Sequence[str]) -> str:
    """`podman pull alpine:3`; of a folder or a program its name alone."""
    words = []
    for word in command:
        if os.path.isabs(word):
            word = os.path.basename(word.rstrip("/"))
        words.append(word)
    return " ".join(words)[:80]
