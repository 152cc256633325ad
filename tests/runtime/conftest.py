"""Fixtures of the tests of whole runs."""

import uuid

import pytest


@pytest.fixture(scope="session")
def runs(tiny_model, tmp_path_factory):
    """The runs of tests/runtime/runs.py, each made once in a test process."""
    from tests.runtime.runs import Runs

    return Runs(tiny_model, tmp_path_factory.mktemp("runs"))


@pytest.fixture
def mark(monkeypatch):
    """A token in the environment of all processes of a test, which must leave none."""
    from tests.runtime.episode_world import MARK, left_of
    from tests.warm import address

    address()  # of the server that forks, which outlives the test
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield value
    assert left_of(value) == []
