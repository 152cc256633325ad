"""The progress of a stage, on one line of a terminal."""

from typing import TextIO

from proxima.runtime.watch.clock import Clock
from proxima.view.formatting import PATIENCE, count, duration, write_safely

INTERVAL = 0.1  # minimum seconds between two updates of the progress on a terminal


class StageProgress:
    """Progress of a stage: on a terminal an updated line with rate, time left and a bar; otherwise a new line every
    `patience` seconds."""

    def __init__(self, stream: TextIO, clock: Clock | None = None, *, patience: float = PATIENCE) -> None:
        self._stream = stream
        self._clock = clock or Clock()
        self._live = stream.isatty()
        self._wait = INTERVAL if self._live else patience
        self._stage = ""
        self._start = 0.0
        self._last_output = self._clock.now()
        self._width = 0

    def begin(self, stage: str) -> None:
        """Start timing a stage."""
        self._stage = stage
        self._start = self._clock.now()
        self._last_output = self._start

    def update(self, stage: str, done: int, total: int | None, unit: str = "") -> None:
        """Report `done` of `total`, None if unknown; a new name begins a new stage."""
        if stage != self._stage:
            self.begin(stage)
        if self._clock.now() - self._last_output < self._wait:
            return
        rate = done / max(self._clock.now() - self._start, 1e-9)
        text = f"{stage}  {count(done)}"
        share = None
        if total:
            text += f"/{count(total)}"
            share = done / total
        text = f"{text} {unit}".rstrip() + f"   {rate:,.1f}/s"
        if rate and total and done < total:
            text += f"   eta {duration((total - done) / rate)}"
        self.show(text, share)

    def show(self, text: str, share: float | None = None) -> None:
        """Write the text now, on a terminal in place of the previous one; `share` adds a bar."""
        self._last_output = self._clock.now()
        self.clear()
        if not self._live:
            self.write(text)
            return
        if share is not None:
            filled = round(24 * share)
            text = f"{text}  {'━' * filled}{'╌' * (24 - filled)}"
        self._width = len(text)
        write_safely(self._stream, text)

    def write(self, line: str) -> None:
        """Write a permanent line."""
        self.clear()
        write_safely(self._stream, f"{line}\n")

    def clear(self) -> None:
        """Erase the progress line; also called after Ctrl-C."""
        if self._width:
            write_safely(self._stream, f"\r{' ' * self._width}\r")
            self._width = 0
