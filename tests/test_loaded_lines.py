"""A quickstart loads what it runs."""

from pathlib import Path

import pytest

from proxima.kernels import compiled
from scripts import loaded_lines

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_KERNELS = {"engine.block_sampler", "model.blockwise_log_prob"}  # a machine without them loads these
UNUSED = (ROOT / "tests" / "unused.txt").read_text().split()  # by a quickstart; a module stands for those below it


@pytest.fixture(scope="module")
def loaded(tiny_model, tmp_path_factory):
    return loaded_lines.loaded_by_quickstart(tiny_model("llama"), tmp_path_factory.mktemp("loaded"))


@pytest.fixture(scope="module")
def instead():
    """The modules that this machine loads for the kernels that it lacks."""
    return WITHOUT_KERNELS if compiled.unavailable(compiled.PRODUCTS) else set()


def test_nothing_that_it_does_not_use(loaded, instead):
    unused = tuple(f"proxima.{name}." for name in UNUSED if name not in instead)
    assert {name: module.importer for name, module in loaded.items() if f"{name}.".startswith(unused)} == {}


def test_what_it_uses_is_seen(loaded):
    assert {"proxima.runtime.loop.controller", "proxima.core.surrogate.cppo", "proxima.task.arithmetic"} <= set(loaded)


def test_what_is_unused_exists():
    """A renamed module would pass the test above for nothing."""
    places = [ROOT / "src" / "proxima" / name.replace(".", "/") for name in UNUSED]
    assert [place for place in places if not place.is_dir() and not place.with_suffix(".py").is_file()] == []
