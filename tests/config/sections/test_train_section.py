"""Optimizers that can't train, in one line each."""

import importlib.util

from proxima.config import resolve
from proxima.config.validate import check


def problems(recipe, *overrides):
    return [str(problem) for problem in check(resolve(recipe(), list(overrides))) if "optimizer" in str(problem)]


def test_a_package_that_is_missing_is_named(recipe, monkeypatch):
    find_spec = importlib.util.find_spec
    words = ["train.optimizer=adamw_8bit"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "torchao" else find_spec(name))
    assert problems(recipe, *words) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find_spec(name))
    remedy = "needs the package torchao: pip install 'proxima-rl[low-bit]'"
    assert problems(recipe, *words) == [f"train.optimizer.kind=adamw_8bit (command line): {remedy}"]
    own = ["algorithm=ppo", "critic=model", "critic.optimizer=adamw_8bit"]
    assert problems(recipe, *own) == [f"critic.optimizer.kind=adamw_8bit (command line): {remedy}"]
