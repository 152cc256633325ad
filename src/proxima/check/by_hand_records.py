"""Records worked out by hand: JSON that names our specs, their inputs and the expected numbers.

    [{"name": …, "source": "by hand", "surrogate": {"kind": "topr", "upper": 1.0}, "inputs": …, "expected": …}, …]

Slots: surrogate, correction, penalty, aggregate, advantage, distillation, selection, preference, reward_kl, proximal,
mismatch. The names of inputs and expected numbers are documented in `proxima.check.by_hand`."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import Tensor

from proxima.check.by_hand import SLOTS, as_tensor, leaves, numbers_by_hand, require_numbers
from proxima.check.laws import Law, LawResult, check_law, described
from proxima.config import resolve
from proxima.config.problems import one_problem
from proxima.config.slots import Slot
from proxima.config.tree import Source, node_of
from proxima.core.correction import MismatchGuard
from proxima.core.reward_kl import RewardKl
from proxima.data import NoFieldError, UserError
from proxima.system.text_files import read_text

SOURCES = ("by hand", "hand")
KEYS = ("name", "source", "inputs", "expected", "dtype", "layout")


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
    return numbers_by_hand({slot: getattr(made, slot) for slot in written}, inputs)


def read_records(file: Path, form: str, require_record: Callable[[dict[str, Any]], object]) -> list[dict[str, Any]]:
    """The records of a file.

    Args:
        form: a description of a record's contents, for the error.
        require_record: raises a ValueError that describes an invalid record.

    Raises: a one-line UserError.
    """

    def refused(reason: str) -> UserError:
        return one_problem(str(file), f"{reason}; give a JSON list of records {form}")

    try:
        records = json.loads(read_text(file))
    except OSError as error:
        raise refused(f"can't be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise refused("is not UTF-8 text") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise refused(f"not JSON: {error}") from None
    if not isinstance(records, list):
        raise refused(f"holds a {type(records).__name__}, not a list")
    for index, record in enumerate(records):
        if not isinstance(record, dict):
            raise refused(f"entry {index} is a {type(record).__name__}, not a record")
        try:
            require_record(record)
        except ValueError as error:
            raise refused(f"entry {index}: {str(error).rstrip('.')}") from None
    return records


def require_record_by_hand(record: Mapping[str, Any]) -> None:
    """Raise a UserError unless the record has exactly the keys of a hand-worked one, a spec and expected numbers."""
    title = f"golden record {record.get('name', '?')!r}"
    for key in ("name", "source", "inputs", "expected"):
        if key not in record:
            raise UserError(f"{title} has no {key!r}")
        if key in ("inputs", "expected") and not isinstance(record[key], dict):
            raise UserError(f"{title}: {key!r} is a {type(record[key]).__name__}, expected a mapping")
        if key in ("inputs", "expected") and not record[key]:
            raise UserError(f"{title}: {key!r} is empty")
    if record["source"] not in SOURCES:
        raise UserError(f"{title} is of {record['source']!r}, not by hand", remedy="check it with proxima peers verify")
    if not isinstance(record["name"], str):
        raise UserError(f"{title}: 'name' must be a text")
    if all(record.get(slot) is None for slot in SLOTS):
        raise UserError(f"{title} names no spec", remedy=f"add one of {', '.join(SLOTS)}")
    if unknown := sorted(record.keys() - {*KEYS, *SLOTS}):
        raise UserError(f"{title} has the unknown keys {', '.join(unknown)}")


def check_record(record: Mapping[str, Any], import_code: bool = False) -> LawResult:
    """Check a hand-worked record, as a law with the record's name.

    Raises:
        UserError: the record itself is wrong: it names something that does not exist, or its numbers are not numbers.
    """
    title = f"golden record {record['name']!r}"
    for part in ("inputs", "expected"):
        for name, value in leaves(record[part]).items():
            try:
                as_tensor(value)
            except (ValueError, TypeError):
                raise UserError(f"{title}: {part}.{name} must be numbers, in rows of equal length") from None

    def check(record: Mapping[str, Any], _: None) -> None:
        require_numbers(numbers, record["expected"])

    law = Law(record["name"], "the code is not the formula", check)
    specs = {slot: record[slot] for slot in SLOTS if slot in record}
    try:
        numbers = numbers_of_record(record["name"], specs, record["inputs"], import_code)
    except (UserError, NoFieldError) as error:
        raise UserError(f"{title}: {'; '.join(str(error).splitlines())}") from None
    except Exception as error:  # third-party code may raise anything
        return LawResult(law, "FAILED", described(error))
    return check_law(law, record)


def check_records(file: str, import_code: bool = False) -> Iterator[LawResult]:
    """Check the hand-worked records of a file.

    Raises:
        UserError: the file holds no record, or an invalid one.
    """
    form = "{name, source, inputs, expected} with a spec by slot"
    records = read_records(Path(file), form, require_record_by_hand)
    if not records:
        raise one_problem(file, f"holds no record; give a JSON list of records {form}")
    for record in records:
        yield check_record(record, import_code)
