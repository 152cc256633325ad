"""The numbers of a record, one by one, and how one of them would be wrong."""

import copy
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every single number below `value`, with the keys and indices that lead to it."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if children is None:
        yield path, value
        return
    for key, child in children:
        yield from numbers(child, (*path, key))


def altered(value: Any, *, by: float) -> Any:
    """Relatively `by` off; the other one for an entry of a mask, the next for a count; some number where there was
    none."""
    if isinstance(value, bool) or value in (0, 1):
        return 1 - value
    if isinstance(value, int):
        return value + 1
    return value * (1 + by) if isinstance(value, float) else 0.123


def undefined(record: dict[str, Any], path: tuple[Any, ...]) -> bool:
    """A position [row, column, …] outside the mask, where peers leave what they like."""
    mask = record["inputs"].get("mask") or record["expected"].get("loss_mask")
    at = [index for index in path if isinstance(index, int)][:2]
    if mask is None or len(at) < 2 or len(mask[0]) <= at[1]:
        return False
    return not mask[at[0]][at[1]]


def mutants(
    records: Sequence[dict[str, Any]], change: Callable[[dict[str, Any], str, Any], float]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Of each source and each of its expected leaves, one record with one number altered, relatively by `change(record,
    leaf, number)`; which one is drawn from its name."""
    by_leaf: dict[tuple[str, str], list[tuple[dict[str, Any], tuple[Any, ...]]]] = {}
    for record in records:
        for path, value in numbers(record["expected"]):
            if undefined(record, path):
                continue
            if (
                not isinstance(value, float) or value == 0 or abs(value) > 1e-5
            ):  # what lies below is rounding in some peers
                leaf = ".".join(key for key in path if isinstance(key, str))
                by_leaf.setdefault((record["source"], leaf), []).append((record, path))
    for (source, leaf), places in by_leaf.items():
        record, path = places[zlib.crc32(f"{source} {leaf}".encode()) % len(places)]
        wrong = copy.deepcopy(record)
        holder = wrong["expected"]
        for key in path[:-1]:
            holder = holder[key]
        number = holder[path[-1]]
        holder[path[-1]] = altered(number, by=change(record, leaf, number))
        yield record["name"], leaf, wrong
