"""Every golden record is matched, or differs for a reason that this folder's README names."""

import copy
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from proxima.core.verify import totals, verify_file, verify_record

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("*.json"))
RECORDS = [record for file in FILES for record in json.loads(file.read_text())]
REASONS = set(re.findall(r"\b(?:[PTUA]\d+|float32)\b", (HERE / "README.md").read_text()))
UNSUPPORTED = "trim_outliers_ratio"  # UniRL's statistics without the extremes: nothing of ours


@pytest.mark.parametrize("record", RECORDS, ids=[record["name"] for record in RECORDS])
def test_record(record: dict[str, Any]) -> None:
    verdict = verify_record(record)
    if UNSUPPORTED in record["name"]:
        assert verdict.status == "unsupported"
        return
    assert verdict.status in ("matched", "differs"), verdict.reason
    assert verdict.status == "matched" or verdict.reason in REASONS


def test_nearly_all_match_and_every_family_is_here() -> None:
    counts = totals(verdict for file in FILES for verdict in verify_file(file))
    assert counts["records"] == len(RECORDS) >= 300 and counts["failed"] == 0
    assert counts["matched"] >= 0.9 * len(RECORDS) and counts["unsupported"] <= 0.01 * len(RECORDS)
    assert len({record["source"] for record in RECORDS}) >= 50


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_wrong_number_fails(file: Path) -> None:
    """The verdict comes from the numbers: change one that is compared, by a part in ten thousand, and the record no longer matches."""
    record = next(r for r in json.loads(file.read_text()) if verify_record(r).status == "matched" and changed(copy.deepcopy(r)))
    assert verify_record(changed(record)).status == "failed"


def changed(record: dict[str, Any]) -> dict[str, Any] | None:
    """The record with its largest compared number moved; None where it has none that is not 0."""
    compared = set(verify_record(record).compared)
    for name, value in record["expected"].items():
        if name in compared and (place := largest(value)) is not None:
            holder, key = place if place[0] is not None else (record["expected"], name)
            holder[key] = holder[key] * 1.001 + (1 if isinstance(holder[key], int) else 0)
            return record
    return None


def largest(value: Any, holder: Any = None, key: Any = None) -> tuple[Any, Any] | None:
    """Where the number with the largest magnitude sits: its list and its index; (None, None) for a bare number."""
    if isinstance(value, list):
        found = [place for i, item in enumerate(value) if (place := largest(item, value, i)) is not None]
        return max(found, key=lambda place: abs(place[0][place[1]]), default=None)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > 1e-3:
        return (holder, key)
    return None


def test_what_we_cannot_read_is_unsupported() -> None:
    alien = {**RECORDS[0], "source": "somebody 1.0 else.loss", "name": "x"}
    assert verify_record(alien).status == "unsupported" and "no adapter" in str(verify_record(alien).reason)
    strange = copy.deepcopy(next(r for r in RECORDS if r["source"].endswith("compute_policy_loss_vanilla")))
    strange["params"]["loss_agg_mode"] = "median"
    assert verify_record(strange).status == "unsupported"
    with pytest.raises(ValueError, match="has no 'params'"):
        verify_record({"name": "y", "source": "", "dtype": "", "inputs": {}})


def test_reasons_in_use() -> None:
    used = Counter(v.reason for file in FILES for v in verify_file(file) if v.status == "differs")
    assert {"P6", "P10", "P25", "P27", "P35", "T1", "A3", "A5", "A7"} <= set(used)
