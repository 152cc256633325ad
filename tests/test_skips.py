"""Tests that are skipped are counted, and named where nobody allowed it."""

import pytest

from tests.skips import allowed

pytest_plugins = ["pytester"]

CONFTEST = """
from pathlib import Path
from tests.skips import Skips

def pytest_configure(config):
    config.pluginmanager.register(Skips(Path("listed.txt") if Path("listed.txt").exists() else None))
"""
TESTS = """
import pytest

def test_done(): pass

@pytest.mark.skip(reason="no GPU here")
def test_on_a_gpu(): pass

def test_of_a_package(): pytest.importorskip("torchao_of_nobody")
"""


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)

    def start(listed: str | None = None):
        if listed is not None:
            (pytester.path / "listed.txt").write_text(listed)
        return pytester.inline_run("-q"), pytester

    return start


@pytest.mark.parametrize(
    ("listed", "code"),
    [
        (None, 0),
        ("no GPU  # there is none\ncould not import  # packages\n", 0),
        ("no GPU  # there is none\n", 4),
        ("of nothing  # never\n", 4),
    ],
)
def test_a_reason_that_is_on_no_list_fails_the_run(run, listed, code):
    result, _ = run(listed)
    assert result.ret == code
    result.assertoutcome(passed=1, skipped=2)


def test_an_allowed_reason_says_why():
    assert list(allowed("# a list\nno GPU  # there is none\n")) == ["no GPU"]
    with pytest.raises(pytest.UsageError, match="no GPU"):
        allowed("no GPU\n")
