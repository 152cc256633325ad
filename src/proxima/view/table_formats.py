"""A table for other programs: JSON, CSV, or Markdown, printed or written to a file."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from proxima.view.formatting import printable

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
