"""What `make test` prints while it runs: one line that moves, a failure as soon as it is known, and how to repeat it.

On a terminal the line is overwritten; in a file or a CI log there is a line for each tenth of the tests.
"""

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import pytest

EVERY = 0.2  # seconds between two updates of the line on a terminal
SHOWN = 20  # failures whose command is printed at the end


def command(test: str) -> str:
    """Return the command line that repeats a test alone."""
    python = os.path.relpath(sys.executable) if Path(sys.executable).is_relative_to(Path.cwd()) else sys.executable
    return f"{python} -m pytest {shlex.quote(test)}"


class Progress:
    """Counts the outcomes; one object in the process that collects the reports."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.moves = stream, stream.isatty()
        self.start = self.updated = time.monotonic()
        self.total = self.done = self.skipped = self.tenths = 0
        self.failed: list[str] = []

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.total = len(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = self.total or len(session.items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """Count each test under its outcome, and print no letter."""
        if hasattr(report, "wasxfail"):
            return None
        if report.failed:
            return ("failed" if report.when == "call" else "error"), "", ""
        return (report.outcome if report.when == "call" or report.skipped else ""), "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.skipped += report.skipped
        if report.failed:
            self.failed.append(report.nodeid)
            self.write(f"FAILED ({report.when}) {command(report.nodeid)}\n")
        if report.when == "teardown":
            self.done += 1
            self.update()

    def update(self) -> None:
        """Show the line, if it is time to."""
        now, tenths = time.monotonic(), self.done * 10 // max(1, self.total)
        if self.moves and (now - self.updated >= EVERY or self.done == self.total):
            self.updated = now
            self.write(self.line())
        elif not self.moves and tenths > self.tenths:
            self.tenths = tenths
            self.write(self.line() + "\n")

    def line(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self.start), 60)
        counts = f"{self.done:,} of {self.total:,} tests, {len(self.failed)} failed, {self.skipped} skipped"
        return f"{minutes}:{seconds:02} {counts}"

    def write(self, text: str) -> None:
        self.stream.write(f"\r\x1b[K{text}" if self.moves else text)
        self.stream.flush()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.moves:
            self.write("")
        if self.failed:
            terminalreporter.section("each failure alone")
            for test in dict.fromkeys(self.failed[:SHOWN]):
                terminalreporter.write_line(command(test))
