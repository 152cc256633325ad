"""`proxima peers verify`: our mathematics against the numbers of other implementations."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from proxima.cli.parameters import Argument, print_json
from proxima.config.problems import one_problem
from proxima.data import NoFieldError, UserError
from proxima.data.json_reader import load_json
from proxima.system.user_files import read_text

if TYPE_CHECKING:
    from proxima_peers.verify.verdict import RecordVerdict

RECORD = "{name, source, dtype, inputs, params, expected}"
IMPORT_CODE = "import the classes outside proxima that records by hand name, which runs their code"


def verify_files(
    file: Annotated[Sequence[str], Argument(f"JSON list of records {RECORD}, or a folder of such files", words="+")],
    *,
    import_code: Annotated[bool, Argument(IMPORT_CODE)] = False,
    as_json: Annotated[bool, Argument("print totals and every verdict for programs", flag="--json")] = False,
) -> int:
    """Check our mathematics against golden records of other implementations, each with a verdict.

    Returns: 1 if any record failed.
    """
    # here and below, so that --help needs no torch
    from proxima.task.template import to_json_value
    from proxima_peers.verify.verification import totals

    names: list[str] = []
    for name in file:
        names += _files(name)
    # a wrong path is refused before anything is computed
    records = {name: _read_records(Path(name)) for name in names}
    verdicts = {name: [_verdict(raw, import_code) for raw in raws] for name, raws in records.items()}
    total = totals(list(chain.from_iterable(verdicts.values())))
    if as_json:
        files = [
            {
                "file": name,
                "totals": totals(of_file),
                "verdicts": to_json_value([asdict(verdict) for verdict in of_file]),
            }
            for name, of_file in verdicts.items()
        ]
        print_json({**total, "totals": total, "files": files})
    else:
        print("\n".join(_lines(verdicts, total)))
    return 1 if total["failed"] else 0


def _files(name: str) -> list[str]:
    """The file itself, or the JSON files in a folder."""
    if not Path(name).is_dir():
        return [name]
    files = sorted(str(file) for file in Path(name).glob("*.json"))
    if not files:
        raise UserError(f"{name}: a folder without .json files", remedy="give files of records, or a folder of them")
    return files


def _read_records(file: Path) -> list[dict[str, Any]]:
    """The records of a file, or a one-line UserError."""
    from proxima_peers.verify.record import Record

    def refused(reason: str) -> UserError:
        return one_problem(str(file), f"{reason}; give a JSON list of records {RECORD}")

    try:
        records = load_json(read_text(file))
    except OSError as error:
        raise refused(f"can't be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise refused("is not UTF-8 text") from None
    except ValueError as error:
        raise refused(f"not JSON: {error}") from None
    if not isinstance(records, list):
        raise refused(f"holds a {type(records).__name__}, not a list")
    for index, record in enumerate(records):
        if not isinstance(record, dict):
            raise refused(f"entry {index} is a {type(record).__name__}, not a record")
        try:
            Record.of(record)
        except ValueError as error:
            raise refused(f"entry {index}: {str(error).rstrip('.')}") from None
    return records


def _verdict(raw: dict[str, Any], import_code: bool) -> "RecordVerdict":
    """The verdict; a record that our specs refuse is unsupported, and one that makes them raise otherwise failed."""
    from proxima_peers.verify.verdict import RecordVerdict
    from proxima_peers.verify.verification import verify_record

    try:
        return verify_record(raw, import_code=import_code)
    except (UserError, NoFieldError) as error:
        return RecordVerdict(raw["name"], "unsupported", f"refused: {' '.join(str(error).split())}")
    except Exception as error:
        return RecordVerdict(raw["name"], "failed", f"{type(error).__name__}: {' '.join(str(error).split())}")


def _lines(verdicts: dict[str, list["RecordVerdict"]], total: dict[str, int]) -> list[str]:
    from proxima.view.terminal import table_text
    from proxima_peers.verify.verification import totals

    counts = {name: (totals(of_file), _reasons(of_file)) for name, of_file in verdicts.items()}
    if len(verdicts) > 1:
        counts["total"] = (total, "")
    rows = [{"": name} | {key: str(n) for key, n in of.items()} | {"why": why} for name, (of, why) in counts.items()]
    lines = [table_text(rows, sys.stdout, left=("why",))]
    for name, of_file in verdicts.items():
        for verdict in of_file:
            if verdict.status == "failed":
                why = "" if verdict.differences else f": {verdict.reason}"
                lines.append(f"failed  {verdict.name}  ({name}){why}")
            elif verdict.status == "unsupported":
                lines.append(f"unsupported  {verdict.name}  ({name}): {verdict.reason}")
            for d in verdict.differences:
                pair = f"ours {_number(d.ours)}, expected {_number(d.expected)}"
                lines.append(f"    {d.field}{d.at or ''}: {pair}, off by {d.difference:.3g}")
    return lines


def _reasons(verdicts: list["RecordVerdict"]) -> str:
    """`P16 ×3, P27`: the peculiarities that explain the differences."""
    counts = Counter(str(verdict.reason) for verdict in verdicts if verdict.status == "differs")
    texts = []
    for reason, count in sorted(counts.items()):
        if count > 1:
            reason += f" ×{count}"
        texts.append(reason)
    return ", ".join(texts)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.12g}"
    return str(value)
