"""The adapter for records worked out by hand; see `proxima.check.by_hand_records`."""

from collections.abc import Iterator

from proxima.check.by_hand import TOLERANCE
from proxima.check.by_hand_records import numbers_of_record
from proxima.config.problems import suggestion
from proxima_peers.verify.record import Attempt, Record, UnsupportedRecord
from proxima_peers.verify.verdict import uncovered


def by_hand(record: Record, import_code: bool = False) -> Iterator[Attempt]:
    """Compare our numbers with the record's.

    Raises:
        UserError: the record names no spec, or one that doesn't exist or refuses a field.
        UnsupportedRecord: no code of ours computes an expected number.
    """
    numbers = numbers_of_record(record.name, record.params.read(), record.inputs.read(), import_code)
    if unknown := uncovered(record, numbers):
        raise UnsupportedRecord(f"nothing of ours computes {unknown[0]!r} here; {suggestion(unknown[0], numbers)}")
    computed = {leaf: numbers[leaf] for leaf in record.leaves if leaf in numbers}
    rtol, atol = TOLERANCE["rtol"], TOLERANCE["atol"]
    yield None, [record.check(leaf, value, record.leaves[leaf], rtol, atol) for leaf, value in computed.items()]
