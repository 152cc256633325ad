"""Every record worked out by hand is what our specs compute; and no number of it may be wrong."""

import json
from pathlib import Path

import pytest

from proxima_peers.verify.verification import verify_record
from tests.golden.altered import mutants

FILES = sorted(Path(__file__).parent.glob("*.json"))
BY_FILE = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


@BY_FILE
def test_records(file):
    verdicts = [verify_record(record) for record in json.loads(file.read_text())]
    assert verdicts and [verdict for verdict in verdicts if verdict.status != "matched"] == []


@BY_FILE
def test_any_wrong_number_fails(file):
    made = list(mutants(json.loads(file.read_text()), lambda record, leaf, number: 1e-3))
    unnoticed = [(name, leaf) for name, leaf, wrong in made if verify_record(wrong).status != "failed"]
    assert made and unnoticed == []
