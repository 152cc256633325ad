"""Tables for a terminal and for other programs (JSON, CSV, Markdown), and the progress of a stage on one line."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxima.runtime.watch.clock import Clock
from proxima.view.formatting import PATIENCE, count, duration, printable, write_safely

INTERVAL = 0.1  # minimum seconds between two updates of the progress on a terminal


def stacked(rows: Sequence[Mapping[str, str]], width: int) -> list[list[dict[str, str]]]:
    """Split rows into tables of at most `width` characters, one below the other; each begins with the first column."""
    first, *others = rows[0]
    sizes = {name: 2 + max(len(name), *(len(row[name]) for row in rows)) for name in (first, *others)}
    start = min(sizes[first], width // 2)  # a longer name is folded
    blocks, used = [[others[0]]], start + sizes[others[0]]
    for name in others[1:]:
        used += sizes[name]
        if used > width:
            blocks, used = [*blocks, []], start + sizes[name]
        blocks[-1].append(name)
    return [[{name: row[name] for name in (first, *block)} for row in rows] for block in blocks]


def table_text(
    rows: Sequence[Mapping[str, str | Text]], stream: TextIO, *, left: Sequence[str] = (), width: int = 200
) -> str:
    """A table of rows with the same columns, as text: with colours and the width of the stream if that is a terminal,
    else `width` wide. The first column is folded if necessary; the others are right-aligned unless named in `left`."""
    table, terminal, out = Table(box=None, padding=(0, 2, 0, 0), header_style="dim"), stream.isatty(), io.StringIO()
    for i, name in enumerate(rows[0] if rows else ()):
        justify: Any = "left" if i == 0 or name in left else "right"
        table.add_column(name, justify=justify, no_wrap=i > 0, overflow="ellipsis" if i else "fold")
    for row in rows:
        table.add_row(*row.values())
    Console(file=out, force_terminal=terminal, width=None if terminal else width, markup=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").splitlines())


class StageProgress:
    """Progress of a stage: on a terminal an updated line with rate, time left and a bar; otherwise a new line every
    `patience` seconds."""

    def __init__(self, stream: TextIO, clock: Clock | None = None, *, patience: float = PATIENCE) -> None:
        self._stream, self._clock, self._live = stream, clock or Clock(), stream.isatty()
        self._wait = INTERVAL if self._live else patience
        self._stage, self._start, self._last_output, self._width = "", 0.0, self._clock.now(), 0

    def begin(self, stage: str) -> None:
        """Start timing a stage."""
        self._stage, self._start, self._last_output = stage, self._clock.now(), self._clock.now()

    def update(self, stage: str, done: int, total: int | None, unit: str = "") -> None:
        """Report `done` of `total`, None if unknown; a new name begins a new stage."""
        if stage != self._stage:
            self.begin(stage)
        if self._clock.now() - self._last_output < self._wait:
            return
        rate = done / max(self._clock.now() - self._start, 1e-9)
        left = f"   eta {duration((total - done) / rate)}" if rate and total and done < total else ""
        of = f"/{count(total)}" if total else ""
        text = f"{stage}  {count(done)}{of} {unit}".rstrip() + f"   {rate:,.1f}/s{left}"
        self.show(text, done / total if total else None)

    def show(self, text: str, share: float | None = None) -> None:
        """Write the text now, on a terminal in place of the previous one; `share` adds a bar."""
        self._last_output = self._clock.now()
        self.clear()
        if not self._live:
            self.write(text)
            return
        filled = round(24 * (share or 0.0))
        line = text if share is None else f"{text}  {'━' * filled}{'╌' * (24 - filled)}"
        self._width = len(line)
        write_safely(self._stream, line)

    def write(self, line: str) -> None:
        """Write a permanent line."""
        self.clear()
        write_safely(self._stream, f"{line}\n")

    def clear(self) -> None:
        """Erase the progress line; also called after Ctrl-C."""
        if self._width:
            write_safely(self._stream, f"\r{' ' * self._width}\r")
            self._width = 0


Format = Literal["text", "json", "csv", "md"]
Rows = Sequence[Mapping[str, Any]]


def table_as(form: Format, rows: Rows, numbers: Rows, everything: Any) -> str:
    """Return the table as text that ends with a newline.

    Args:
        rows: for Markdown: formatted texts by column.
        numbers: for CSV: values by column, unrounded; a missing one is empty.
        everything: for JSON.
    """
    if form == "json":
        return json.dumps(everything, indent=2, ensure_ascii=False, default=str) + "\n"
    return csv_text(numbers) if form == "csv" else markdown(rows)


def csv_text(rows: Rows) -> str:
    """Return rows as CSV with a header of all their columns, in the order of their first occurrence."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def markdown(rows: Rows) -> str:
    """Return rows with the same columns as a Markdown table; the first column is a name, the others are numbers."""
    columns = list(rows[0]) if rows else []

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(printable(cell).replace("|", r"\|") for cell in cells) + " |\n"

    rule = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(columns))) + "|\n"
    return line(columns) + rule + "".join(line([str(row[name]) for name in columns]) for row in rows)
