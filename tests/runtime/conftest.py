"""Fixtures of the tests of whole runs."""

import time
import uuid
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def runs(tiny_model, tmp_path_factory):
    """The runs of tests/runtime/runs.py, each made once in a test process."""
    from tests.runtime.runs import Runs

    return Runs(tiny_model, tmp_path_factory.mktemp("runs"))


@pytest.fixture
def mark(monkeypatch):
    """A token in the environment of all processes of a test, which must leave none."""
    from tests.runtime.episode_world import MARK, marked
    from tests.warm import address

    address()  # of the server that forks, which outlives the test
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield value
    deadline = time.monotonic() + 300
    while (left := marked(value)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left] == []  # what they are
