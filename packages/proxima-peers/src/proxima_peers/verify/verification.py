"""The verdict on a record, whose source selects the adapter; every key, option and number in it must have been read."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

from proxima.data import NoFieldError, UserError
from proxima_peers.verify import ADAPTERS
from proxima_peers.verify.by_hand_adapter import by_hand
from proxima_peers.verify.record import Record, UnsupportedRecord
from proxima_peers.verify.verdict import RecordVerdict, Status, judge, uncovered


def verify_record(raw: dict[str, Any], *, import_code: bool = False) -> RecordVerdict:
    """The verdict on a record as read from JSON; `unsupported` names the part that we can't interpret. `import_code`:
    import the classes outside proxima that a record by hand names.

    Raises:
        UserError, NoFieldError: a record by hand names no spec, an unknown one or an unknown field, a value that the
            spec refuses, or other inputs than the spec reads. A record of a peer is `unsupported` in these cases.
    """
    record = Record.of(raw)
    if record.unknown:
        return unsupported(record, f"no reading of the keys {', '.join(record.unknown)}")
    adapter = next((of_source for words, of_source in ADAPTERS if all(word in record.source for word in words)), None)
    if adapter is None:
        return unsupported(record, f"no adapter for source {record.source!r}")
    try:
        attempts = by_hand(record, import_code) if adapter is by_hand else adapter(record)
        verdict = judge(record.name, attempts)
    except KeyError as error:
        return unsupported(record, f"no reading of {error.args[0]!r} in {record.source!r}")
    except UnsupportedRecord as error:
        return unsupported(record, str(error))
    except (UserError, NoFieldError) as error:
        if adapter is by_hand:
            raise
        return unsupported(record, f"refused: {error}")
    if verdict.status == "unsupported":
        return unsupported(record, f"no reading of {record.params}")
    unread = record.params.unread
    if unread:
        return unsupported(record, f"no reading of the options {', '.join(unread)} in {record.source!r}")
    missing = uncovered(record, verdict.compared)
    if missing and verdict.status != "failed":
        reason = f"no reading of the expected {', '.join(missing[:3])} in {record.source!r}"
        return unsupported(record, reason, verdict.compared)
    if record.inputs.unread:
        return unsupported(record, f"no reading of the inputs {', '.join(record.inputs.unread)} in {record.source!r}")
    return verdict


def unsupported(record: Record, reason: str, compared: tuple[str, ...] = ()) -> RecordVerdict:
    return RecordVerdict(record.name, "unsupported", reason, compared)


def totals(verdicts: Sequence[RecordVerdict]) -> dict[str, int]:
    """Count the records, and those of each status."""
    counts = Counter(verdict.status for verdict in verdicts)
    return {"records": len(verdicts), **{status: counts[status] for status in get_args(Status)}}
