"""What the scripts beside it share: packed rows in plain Python, and the file of their records."""

import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any


def record(name: str, specs: dict[str, Any], inputs: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "source": "by hand", "dtype": "float64", **specs, "inputs": inputs, "expected": expected}


def write(script: str, records: Iterable[dict[str, Any]]) -> None:
    """The records of `make_x.py` are in x.json, one a line."""
    text = "[\n" + ",\n".join(json.dumps(each, separators=(",", ":")) for each in records) + "\n]\n"
    file = Path(script)
    file.with_name(f"{file.stem.removeprefix('make_')}.json").write_text(text)


def edges_of(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def rows_of(mask: list[int], edges: list[int]) -> list[list[int]]:
    """Of each sequence the places where the mask is set."""
    return [[i for i in range(a, b) if mask[i]] for a, b in pairwise(edges)]


def plain(values: Sequence[float]) -> list[Any]:
    return ["nan" if math.isnan(x) else x for x in values]


def k3(x: float) -> float:
    return math.expm1(x) - x


def variance(values: list[float], correction: int = 0) -> float:
    mean = fmean(values)
    return sum((x - mean) ** 2 for x in values) / max(len(values) - correction, 1)
