"""The table of a reward model's last evaluation: its accuracy beside what needs no model, and its calibration."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from proxima.view.formatting import fixed
from proxima.view.terminal import table_of_rows

FIGURES = {
    "accuracy": "accuracy",
    "length_only/accuracy": "length alone",
    "random/accuracy": "a coin",
    "over_length/accuracy": "accuracy over length alone",
    "calibration/error": "calibration error",
}
BIN = "calibration/"


def pair_table(record: Mapping[str, Any]) -> Table:
    """Held-out figures with their 95 % intervals, and a row for each bin of the calibration; `record` is the line of
    metrics.jsonl."""
    rows = [
        {
            "held-out pairs": name,
            "value": fixed(record[key], 3),
            "95 %": f"{fixed(record[f'{key}/low'], 3)}–{fixed(record[f'{key}/high'], 3)}",
            "pairs": f"{record['answers']:,}",
        }
        for key, name in FIGURES.items()
    ]
    for key in (key for key in record if key.startswith(BIN) and key.endswith("/pairs")):
        place = key.removesuffix("/pairs")
        confident = (
            f"right where {place.removeprefix(BIN)} % sure, {fixed(record[f'{place}/confidence'], 3)} on average"
        )
        value = fixed(record[f"{place}/right"], 3)
        rows.append({"held-out pairs": confident, "value": value, "95 %": "", "pairs": f"{record[key]:,.0f}"})
    return table_of_rows(rows)
