"""Check our mathematics against what other implementations computed: golden records, each with a verdict.

matched: the same numbers. differs: not ours, but what a documented peculiarity of the peer gives, named by its id.
failed: neither.
unsupported: nothing of ours computes this. Exit code 1 if any record failed."""

import argparse
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from proxima.cli.output import print_json
from proxima.data import FieldError

STATUSES = ("matched", "differs", "failed", "unsupported")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="+", help="JSON list of records {name, source, dtype, inputs, params, expected}")
    parser.add_argument("--json", action="store_true", help="print totals and every verdict for programs")


def run(arguments: argparse.Namespace) -> int:
    read = {
        name: _records(name) for name in arguments.file
    }  # all of them first: a wrong path is found before anything is computed
    found = [_Judged(name, [_judge(raw) for raw in records]) for name, records in read.items()]
    total = _totals([one for file in found for one in file.verdicts])
    if arguments.json:
        print_json(
            {
                **total,
                "totals": total,
                "files": [{"file": f.name, "totals": f.totals, "verdicts": f.plain()} for f in found],
            }
        )
    else:
        print("\n".join(_lines(found, total)))
    return 1 if total["failed"] else 0


@dataclass(frozen=True)
class Difference:
    """One compared quantity that is outside its tolerance: the element with the largest difference."""

    field: str
    ours: Any
    expected: Any
    difference: float
    at: list[int]


@dataclass(frozen=True)
class Judgement:
    """A verdict with what a reader needs when it failed."""

    name: str
    status: str
    reason: str | None
    compared: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True)
class _Judged:
    name: str
    verdicts: list[Judgement]

    @property
    def totals(self) -> dict[str, int]:
        return _totals(self.verdicts)

    def plain(self) -> list[dict[str, Any]]:
        return [_finite(asdict(one)) for one in self.verdicts]


def _finite(value: Any) -> Any:
    """Non-finite numbers as texts, as in the records: JSON has none."""
    if isinstance(value, dict):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(child) for child in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _totals(verdicts: list[Judgement]) -> dict[str, int]:
    counts = Counter(one.status for one in verdicts)
    return {"records": len(verdicts), **{status: counts[status] for status in STATUSES}}


def _records(name: str) -> list[dict[str, Any]]:
    """The records of a file; what is wrong with it as the user's line."""
    from proxima.config.problems import one_problem
    from proxima.peers.verify import Record

    wanted = "give a JSON list of records {name, source, dtype, inputs, params, expected}"
    try:
        raw = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise one_problem(name, f"can't be read ({error.strerror}); {wanted}") from None
    except UnicodeDecodeError:
        raise one_problem(name, f"is not UTF-8 text; {wanted}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise one_problem(name, f"not JSON: {error}; {wanted}") from None
    if not isinstance(raw, list):
        raise one_problem(name, f"holds a {type(raw).__name__}, not a list; {wanted}")
    for index, item in enumerate(raw):
        if not isinstance(item, dict):
            raise one_problem(name, f"entry {index} is a {type(item).__name__}, not a record; {wanted}")
        try:
            record = Record.of(item)
        except ValueError as error:
            raise one_problem(name, f"entry {index}: {error}".rstrip(".") + f"; {wanted}") from None
        for key in ("name", "source", "dtype"):
            if not isinstance(getattr(record, key), str):
                raise one_problem(name, f"entry {index}: {key} is no text; {wanted}")
    return raw


def _judge(raw: dict[str, Any]) -> Judgement:
    from proxima.peers.verify import verify_record

    try:
        verdict = verify_record(raw)
    except Exception as error:
        text = " ".join(str(error).split())
        if isinstance(error, FieldError):  # a spec refuses the record's parameters
            return Judgement(raw["name"], "unsupported", f"refused: {text}")
        return Judgement(raw["name"], "failed", f"{type(error).__name__}: {text}")
    differences = _differences(raw) if verdict.status == "failed" else ()
    return Judgement(verdict.name, verdict.status, verdict.reason, verdict.compared, differences)


def _differences(raw: dict[str, Any]) -> tuple[Difference, ...]:
    """What the closest reading gives against the record, where it is off; the worst element of each quantity."""
    from proxima.peers.verify import ADAPTERS, Record, closest
    from proxima.peers.verify.record import as_tensor

    record = Record.of(raw)
    adapter = next(found for words, found in ADAPTERS if all(word in record.source for word in words))
    found = []
    for check in closest(list(adapter(record))):
        if not check.error():
            continue
        ours, theirs = as_tensor(check.readings[0]), as_tensor(check.theirs)
        if ours.shape != theirs.shape:
            found.append(
                Difference(check.name, f"shape {list(ours.shape)}", f"shape {list(theirs.shape)}", float("inf"), [])
            )
            continue
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        gap = (ours - theirs).abs().nan_to_num(nan=float("inf")).masked_fill(same, 0.0)
        flat = int(gap.flatten().argmax())
        at = [flat // _stride(gap.shape, axis) % size for axis, size in enumerate(gap.shape)]
        pair = float(ours.flatten()[flat]), float(theirs.flatten()[flat])
        found.append(Difference(check.name, *pair, float(gap.flatten()[flat]), at))
    return tuple(found)


def _stride(shape: Any, axis: int) -> int:
    stride = 1
    for size in shape[axis + 1 :]:
        stride *= size
    return stride


def _lines(found: list[_Judged], total: dict[str, int]) -> list[str]:
    width = max(len("total"), *(len(file.name) for file in found))
    lines = [f"{'':<{width}}  records  matched  differs  failed  unsupported"]
    lines += [_row(file.name, file.totals, width) + _reasons(file.verdicts) for file in found]
    if len(found) > 1:
        lines.append(_row("total", total, width))
    for file in found:
        for one in file.verdicts:
            if one.status == "failed":
                lines.append(f"failed  {one.name}  ({file.name})" + ("" if one.differences else f": {one.reason}"))
                for d in one.differences:
                    lines.append(
                        f"    {d.field}{d.at or ''}: ours {_number(d.ours)}, expected {_number(d.expected)}, off by "
                        f"{d.difference:.3g}"
                    )
            elif one.status == "unsupported":
                lines.append(f"unsupported  {one.name}  ({file.name}): {one.reason}")
    return lines


def _row(name: str, totals: dict[str, int], width: int) -> str:
    cells = zip(totals.values(), (7, 7, 7, 6, 11), strict=True)
    return f"{name:<{width}}  " + "  ".join(f"{count:>{size}}" for count, size in cells)


def _reasons(verdicts: list[Judgement]) -> str:
    """`  P16 ×3, P27`: the peculiarities that explain what differs."""
    counts = Counter(str(one.reason) for one in verdicts if one.status == "differs")
    return (
        "  " + ", ".join(f"{reason} ×{count}" if count > 1 else reason for reason, count in sorted(counts.items()))
        if counts
        else ""
    )


def _number(value: Any) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)
