"""The golden records, of peers and worked out by hand, with their verdicts."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from proxima.core import AGGREGATES, DISTILLATIONS, PENALTIES
from proxima.core.advantage import ADVANTAGES
from proxima.core.correction import CORRECTIONS
from proxima.core.preference import PREFERENCES
from proxima.core.preference.kto import Kto
from proxima.core.surrogate import SURROGATES
from proxima.core.value import RewardLoss, ValueLoss
from proxima_peers.verify.verdict import RecordVerdict
from proxima_peers.verify.verification import verify_record

FOLDERS = (Path(__file__).parent / "golden", Path(__file__).parents[3] / "tests" / "golden")
FILES = [file for folder in FOLDERS for file in sorted(folder.glob("*.json"))]
TABLES = (SURROGATES, CORRECTIONS, PENALTIES, AGGREGATES, ADVANTAGES, PREFERENCES, DISTILLATIONS)
SPECS = {cls for table in TABLES for cls in table.values()} | {Kto, ValueLoss, RewardLoss}


def owner_of_call(cls: type) -> Any:
    """The class that defines its `__call__`."""
    return next(base for base in cls.__mro__ if "__call__" in base.__dict__)


@dataclass(frozen=True)
class Verified:
    """A golden record, the verdict on it, and the specs that the verdict took a call of."""

    record: dict[str, Any]
    verdict: RecordVerdict
    called: set[type]


def verified_records() -> dict[str, Verified]:
    """Every golden record by its name."""
    verified, called = {}, set()
    with pytest.MonkeyPatch.context() as patch:
        for owner in {owner_of_call(cls) for cls in SPECS}:

            def spied(self: Any, *args: Any, _own: Any = owner.__dict__["__call__"]) -> Any:
                called.add(type(self))
                return _own(self, *args)

            patch.setattr(owner, "__call__", spied)
        for file in FILES:
            for record in json.loads(file.read_text()):
                called.clear()
                verified[record["name"]] = Verified(record, verify_record(record), called & SPECS)
    return verified
