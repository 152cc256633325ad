"""Records worked out by hand: they name our specs, so no adapter has to choose them.

    {"name": …, "source": "by hand", "surrogate": {"kind": "topr", "upper": 1.0}, "inputs": …, "expected": …}

Slots: surrogate, correction, penalty, aggregate, advantage, distillation, selection, preference, reward_kl, proximal,
mismatch. What inputs and expected numbers may be called is in `proxima.check.by_hand`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from proxima.check.by_hand import SLOTS, TOLERANCE, numbers_by_hand
from proxima.config import resolve
from proxima.config.problems import suggestion
from proxima.config.slots import Slot
from proxima.config.tree import Source, node_of
from proxima.core.correction import MismatchGuard
from proxima.core.reward_kl import RewardKl
from proxima.data import UserError
from proxima.peers.verify.record import Attempt, NoReading, Record
from proxima.peers.verify.verdict import uncovered


@dataclass(frozen=True)
class SpecsByHand:
    """The specs that a record may name, as a recipe names them."""

    surrogate: Annotated[Any, Slot("proxima.core.surrogate:SURROGATES")] = None
    correction: Annotated[Any, Slot("proxima.core.correction:CORRECTIONS")] = None
    penalty: Annotated[Any, Slot("proxima.core:PENALTIES")] = None
    aggregate: Annotated[Any, Slot("proxima.core:AGGREGATES")] = None
    advantage: Annotated[Any, Slot("proxima.core.advantage:ADVANTAGES")] = None
    distillation: Annotated[Any, Slot("proxima.core:DISTILLATIONS")] = None
    selection: Annotated[Any, Slot("proxima.core:SELECTIONS")] = None
    preference: Annotated[Any, Slot("proxima.core.preference:PREFERENCES")] = None
    reward_kl: RewardKl | None = None
    proximal: Literal["next", "linear", "loglinear"] | None = None
    mismatch: MismatchGuard | None = None


def by_hand(record: Record, import_code: bool = False) -> Iterator[Attempt]:
    """Ours against the numbers of the record.

    Raises:
        UserError: the record names no spec, or one that doesn't exist or refuses a field.
        NoReading: nothing of ours computes an expected number.
    """
    written = {slot: spec for slot, spec in record.params.read().items() if spec is not None}
    if not written:
        raise UserError(f"golden record {record.name!r} names no spec", remedy=f"add one of {', '.join(SLOTS)}")
    layer = node_of(written, Source(record.name))
    specs = resolve({}, layer=layer, root=SpecsByHand, import_code=import_code).config
    numbers = numbers_by_hand({slot: getattr(specs, slot) for slot in written}, record.inputs.read())
    if unknown := uncovered(record, numbers):
        raise NoReading(f"nothing of ours computes {unknown[0]!r} here; {suggestion(unknown[0], numbers)}")
    found = {leaf: numbers[leaf] for leaf in record.leaves if leaf in numbers}
    yield None, [record.check(leaf, value, record.leaves[leaf], **TOLERANCE) for leaf, value in found.items()]
