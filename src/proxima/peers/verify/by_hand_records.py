"""Records worked out by hand: they name our specs, so no adapter has to choose them.

    {"name": …, "source": "by hand", "surrogate": {"kind": "topr", "upper": 1.0}, "inputs": …, "expected": …}

Slots: surrogate, correction, penalty, aggregate, advantage. What inputs and expected numbers may be called is in
`proxima.conformance.by_hand`."""

from collections.abc import Iterator
from typing import Any

from proxima.config.describe import lookup
from proxima.config.schema import Slot
from proxima.conformance.by_hand import TOLERANCE, numbers_by_hand
from proxima.data import UserError
from proxima.peers.verify.record import Attempt, Record

TABLES = {
    "surrogate": "proxima.core.surrogate:SURROGATES",
    "correction": "proxima.core.correction:CORRECTIONS",
    "penalty": "proxima.core.penalty:PENALTIES",
    "aggregate": "proxima.core.aggregate:AGGREGATES",
    "advantage": "proxima.core.advantage:ADVANTAGES",
}


def by_hand(record: Record) -> Iterator[Attempt]:
    """Ours against the numbers of the record."""
    specs = {slot: spec_of(slot, record.params[slot], record) for slot in record.params}
    if not specs:
        raise UserError(f"golden record {record.name!r} names no spec", remedy=f"add one of {', '.join(TABLES)}")
    numbers = numbers_by_hand(specs, {name: record.inputs[name] for name in record.inputs})
    found = {leaf: numbers[leaf] for leaf in record.leaves if leaf in numbers}
    yield None, [record.check(leaf, value, record.leaves[leaf], **TOLERANCE) for leaf, value in found.items()]


def spec_of(slot: str, written: Any, record: Record) -> Any:
    """The spec of `"topr"`, `{"kind": "topr", "upper": 2.0}` or `{"kind": "my_lab.losses:Topr"}`."""
    fields = {"kind": written} if isinstance(written, str) else {key: written[key] for key in written}
    kind = fields.pop("kind", None)
    if not isinstance(kind, str):
        raise UserError(f"golden record {record.name!r}: {slot} has no kind")
    return lookup(kind, Slot(TABLES[slot]), slot, record.name)(**fields)
