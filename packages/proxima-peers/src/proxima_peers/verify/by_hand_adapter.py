"""The adapter for records worked out by hand: JSON that names our specs, their inputs and the expected numbers.

    [{"name": …, "source": "by hand", "surrogate": {"kind": "topr", "upper": 1.0}, "inputs": …, "expected": …}, …]

Slots: surrogate, correction, penalty, aggregate, advantage, distillation, selection, preference, reward_kl, proximal,
mismatch. The names of inputs and expected numbers are documented in `proxima.laws.by_hand` and `record_steps`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch import Tensor

from proxima.config.resolution import resolve
from proxima.config.tree import Source, node_of
from proxima.core.correction.guard import MismatchGuard
from proxima.core.reward_kl import RewardKl
from proxima.data import UserError
from proxima.data.errors import suggestion
from proxima.data.kinds import Slot
from proxima.laws.by_hand import TOLERANCE, numbers_by_hand
from proxima_peers.verify.record import Attempt, Record, UnsupportedRecord
from proxima_peers.verify.record_steps import RECORD_STEPS, SLOTS
from proxima_peers.verify.verdict import uncovered


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


def numbers_of_record(
    name: str, specs: Mapping[str, Any], inputs: Mapping[str, Any], import_code: bool = False
) -> dict[str, Tensor]:
    """The numbers that our specs compute from the inputs of a record.

    Args:
        specs: the specs by slot, as a recipe writes them; null counts as absent.
        import_code: import classes outside proxima that the record names.

    Raises:
        UserError, NoFieldError: the record names no spec, an unknown spec or field, a value that the spec refuses, or
            inputs other than the spec reads.
    """
    written = {slot: spec for slot, spec in specs.items() if spec is not None}
    if not written:
        raise UserError(f"golden record {name!r} names no spec", remedy=f"add one of {', '.join(SLOTS)}")
    made = resolve({}, layer=node_of(written, Source(name)), root=SpecsByHand, import_code=import_code).config
    return numbers_by_hand({slot: getattr(made, slot) for slot in written}, inputs, RECORD_STEPS)


def by_hand(record: Record, import_code: bool = False) -> Iterator[Attempt]:
    """Compare our numbers with the record's.

    Raises:
        UserError: the record names no spec, or one that doesn't exist or refuses a field.
        UnsupportedRecord: no code of ours computes an expected number.
    """
    numbers = numbers_of_record(record.name, record.params.read(), record.inputs.read(), import_code)
    unknown = uncovered(record, numbers)
    if unknown:
        raise UnsupportedRecord(f"nothing of ours computes {unknown[0]!r} here; {suggestion(unknown[0], numbers)}")
    computed = {leaf: numbers[leaf] for leaf in record.leaves if leaf in numbers}
    rtol = TOLERANCE["rtol"]
    atol = TOLERANCE["atol"]
    yield None, [record.expect(leaf, value, rtol, atol) for leaf, value in computed.items()]
