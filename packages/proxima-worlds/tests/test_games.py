"""Games need their package, and say so."""

import importlib.util

import pytest

from proxima.data import UserError
from proxima_worlds.games import ReasoningGym


def test_a_game_without_its_package_says_what_installs_it(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "reasoning_gym" else found(name))
    with pytest.raises(UserError, match=r"it needs the package reasoning-gym: pip install 'proxima-rl\[gym\]'"):
        ReasoningGym(task="chain_sum")
