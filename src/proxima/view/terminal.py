"""Tables for a terminal and for other programs: JSON, CSV, Markdown."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxima.view.formatting import output_width, printable

Format = Literal["text", "json", "csv", "md"]
Rows = Sequence[Mapping[str, Any]]


def stacked(rows: Sequence[Mapping[str, str]], width: int) -> list[list[dict[str, str]]]:
    """Split rows into tables of at most `width` characters, one below the other; each begins with the first column."""
    first, *others = rows[0]
    sizes = {name: 2 + max(len(name), *(len(row[name]) for row in rows)) for name in (first, *others)}
    start = min(sizes[first], width // 2)  # a longer name is folded
    blocks = [[others[0]]]
    used = start + sizes[others[0]]
    for name in others[1:]:
        used += sizes[name]
        if used > width:
            blocks = [*blocks, []]
            used = start + sizes[name]
        blocks[-1].append(name)
    return [[{name: row[name] for name in (first, *block)} for row in rows] for block in blocks]


def table_text(
    rows: Sequence[Mapping[str, str | Text]], stream: TextIO, *, left: Sequence[str] = (), width: int = 200
) -> str:
    """A table of rows with the same columns, as text: with colours and the width of the stream if that is a terminal,
    else as wide as `COLUMNS` says, or `width`. The first column is folded if necessary; the others are right-aligned
    unless named in `left`."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    terminal = stream.isatty()
    out = io.StringIO()
    names = list(rows[0]) if rows else []
    for name in names:
        if name == names[0]:
            table.add_column(name, justify="left", overflow="fold")
        else:
            justify: Any = "left" if name in left else "right"
            table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*row.values())
    columns = None if terminal else output_width(stream) or width
    Console(file=out, force_terminal=terminal, width=columns, markup=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").splitlines())


def table_as(form: Format, rows: Rows, numbers: Rows, everything: Any) -> str:
    """Return the table as text that ends with a newline.

    Args:
        rows: for Markdown: formatted texts by column.
        numbers: for CSV: values by column, unrounded; a missing one is empty.
        everything: for JSON.
    """
    if form == "json":
        return json.dumps(everything, indent=2, ensure_ascii=False, default=str) + "\n"
    if form == "csv":
        return csv_text(numbers)
    return markdown(rows)


def csv_text(rows: Rows) -> str:
    """Return rows as CSV with a header of all their columns, in the order of their first occurrence."""
    columns = list(dict.fromkeys(chain.from_iterable(rows)))
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

    alignments = ["---:"] * len(columns)
    alignments[:1] = ["---"]
    rule = "|" + "|".join(alignments) + "|\n"
    return line(columns) + rule + "".join(line([str(row[name]) for name in columns]) for row in rows)
