"""Commands that another distribution brings."""

import importlib.metadata

import pytest

from proxima.cli.commands import COMMANDS
from proxima.data import kinds

BROUGHT = {name: place for name, (place, _) in COMMANDS.items() if not place.startswith("proxima.")}


@pytest.fixture
def not_installed(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **asked: ())


@pytest.mark.parametrize("words", [["--help"], ["any.yaml"]], ids=" ".join)
@pytest.mark.parametrize("name", sorted(BROUGHT))
def test_one_that_is_missing_says_how_to_install_it(name, words, proxima, not_installed, monkeypatch, here):
    package = BROUGHT[name]
    line = f"error: proxima {name} needs the package {package}; pip install"
    folder = kinds.CHECKOUT / "packages" / package
    assert proxima(name, *words) == (2, "", f"{line} --editable {folder}\n")
    monkeypatch.setattr(kinds, "CHECKOUT", here)
    assert proxima(name, *words) == (2, "", f"{line} {package}\n")


def test_the_help_lists_it_all_the_same(proxima, not_installed):
    _, out, _ = proxima("--help")
    assert sorted(BROUGHT) == ["peers", "plan", "serve-training"] and all(f"\n    {name} " in out for name in BROUGHT)
