"""Every record worked out by hand is what our specs compute; and no number of it may be wrong."""

import json
from pathlib import Path

import pytest

from proxima.check.by_hand_records import check_record, check_records
from tests.golden.altered import mutants

FILES = sorted(Path(__file__).parent.glob("*.json"))
BY_FILE = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


@BY_FILE
def test_records(file):
    results = list(check_records(str(file)))
    assert results and [result for result in results if result.status != "passed"] == []


@BY_FILE
def test_any_wrong_number_fails(file):
    made = list(mutants(json.loads(file.read_text()), lambda record, leaf, number: 1e-3))
    unnoticed = [(name, leaf) for name, leaf, wrong in made if check_record(wrong).status != "FAILED"]
    assert made and unnoticed == []
