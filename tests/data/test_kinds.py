"""Tables of kinds, and rooms whose names are imported at their first use."""

import ast
import compileall
import importlib
import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import proxima
from proxima.data.kinds import Kinds

FRACTIONS = Kinds({"fraction": "fractions:Fraction", "ended": "no_such_module:Class"})
ROOMS = ("core", "config", "data", "engine", "engine.serve", "evaluate", "experiments", "laws", "model", "prepare")
ROOMS += ("reward", "task", "train", "view.trackers", "api")


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


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_every_name_that_it_lists(room):
    module = importlib.import_module(f"proxima.{room}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018

    late = lazy_names(Path(module.__file__))  # importing `room.name` would set the attribute `name` of the room
    assert late and late.isdisjoint(path.stem for path in Path(module.__file__).parent.iterdir())


def lazy_names(path: Path) -> set[str]:
    """What the block of type checkers imports."""
    blocks = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    return {alias.name for block in blocks for node in block.body for alias in node.names}


PROGRAM = """
import json, numpy.random, sys, torch

before = set(sys.modules)
import proxima.core
packages = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
from proxima.core.surrogate import SURROGATES
SURROGATES["sapo"]
loaded = sorted(name for name in sys.modules if name.startswith("proxima.core.surrogate."))
from proxima.core import Cppo
from proxima.data import Trajectory
print(json.dumps([sorted(packages), loaded, proxima.core.__file__]))
"""


def test_what_a_process_imports_of_an_installation_without_sources(tmp_path):
    """Of core torch, numpy and nothing else; of a table no kind but the one taken; and the names that a package imports
    at first use are read from its compiled module."""
    left_out = shutil.ignore_patterns("__pycache__")
    copy = shutil.copytree(Path(proxima.__file__).parent, tmp_path / "proxima", ignore=left_out)
    for place in (copy / "core", copy / "data"):
        assert compileall.compile_dir(place, quiet=1, legacy=True)
        for file in place.rglob("*.py"):
            file.unlink()
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    packages, loaded, file = json.loads(done.stdout)
    assert set(packages) - {"numpy", "torch"} == {"proxima"}
    assert loaded == ["proxima.core.surrogate.weight"]
    assert file.endswith(".pyc")


def test_a_module_of_a_package_is_its_attribute():
    import proxima.core

    assert proxima.core.surrogate.SURROGATES["cppo"] is proxima.core.Cppo
    assert proxima.core.aggregate.TokenMean is proxima.core.TokenMean
    with pytest.raises(AttributeError, match="module 'proxima.core' has no attribute 'nothing'"):
        _ = proxima.core.nothing


def test_a_kind_whose_module_is_being_imported_has_no_instances(monkeypatch):
    monkeypatch.setitem(sys.modules, "half_imported", types.ModuleType("half_imported"))
    assert not Kinds({"slow": "half_imported:Slow"}).holds(3, "slow")
