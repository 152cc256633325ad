"""Tables of kinds, and what the rooms of the library load."""

import importlib
import json
import subprocess
import sys
import types

import pytest

from proxima.data.kinds import Kinds

FRACTIONS = Kinds({"fraction": "fractions:Fraction", "ended": "no_such_module:Class"})


def test_names_import_nothing_and_a_kind_its_module():
    assert (list(FRACTIONS), len(FRACTIONS), "ended" in FRACTIONS) == (["fraction", "ended"], 2, True)
    assert FRACTIONS["fraction"](1, 2) == 0.5
    with pytest.raises(KeyError):
        FRACTIONS["halves"]


def test_a_value_is_of_a_kind_only_if_its_class_has_been_imported():
    half = FRACTIONS["fraction"](1, 2)
    assert FRACTIONS.holds(half, "fraction") and FRACTIONS.holds(half, "ended", "fraction")
    assert not FRACTIONS.holds(half, "ended") and not FRACTIONS.holds(0.5, "fraction")
    assert FRACTIONS.kind_of(half) == "fraction" and FRACTIONS.kind_of(0.5) == "builtins:float"


@pytest.mark.parametrize("room", ["core", "data"])
def test_a_room_has_every_name_that_it_lists(room):
    module = importlib.import_module(f"proxima.{room}")
    assert module.__all__ and [name for name in module.__all__ if not hasattr(module, name)] == []


PROGRAM = """
import json, numpy.random, sys, torch

before = set(sys.modules)
import proxima.core
packages = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("proxima.")}
from proxima.core.preference import PREFERENCES
kinds = "proxima.core.preference.two_sided" in sys.modules
print(json.dumps([sorted(packages), sorted(rooms), kinds]))
"""


@pytest.mark.slow
def test_what_core_loads():
    """Torch, numpy, the data and nothing else: it is a library of its own. Of a table no kind that is not taken."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    packages, rooms, kinds = json.loads(done.stdout)
    assert set(packages) - {"numpy", "torch"} == {"proxima"}
    assert set(rooms) == {"core", "data", "version"}
    assert not kinds


def test_a_module_of_a_package_is_its_attribute():
    import proxima.core

    assert proxima.core.surrogate.SURROGATES["cppo"] is proxima.core.Cppo
    assert proxima.core.aggregate.TokenMean is proxima.core.TokenMean
    with pytest.raises(AttributeError, match="module 'proxima.core' has no attribute 'nothing'"):
        _ = proxima.core.nothing


def test_a_kind_whose_module_is_being_imported_has_no_instances(monkeypatch):
    monkeypatch.setitem(sys.modules, "half_imported", types.ModuleType("half_imported"))
    assert not Kinds({"slow": "half_imported:Slow"}).holds(3, "slow")
