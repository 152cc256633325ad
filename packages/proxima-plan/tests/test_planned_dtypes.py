"""The dtypes of a plan, where the recipe leaves them to the machine."""

import pytest

from proxima.config.resolution import resolve
from proxima.model import precision
from proxima.model.precision import DtypeChoice
from proxima_plan.devices import read_devices, this_machine
from proxima_plan.forecast import planned_config

RECIPE = {
    "model": {"path": "org/model", "device": "cpu"},
    "task": "arithmetic",
    "reward": ["number"],
    "algorithm": "cppo",
}


@pytest.fixture
def slow(monkeypatch):
    """A processor without bfloat16 instructions."""
    monkeypatch.setattr(precision, "_measured", lambda: DtypeChoice("float32", "measured"))


@pytest.fixture
def here(monkeypatch):
    for name in ("gemm_rate", "_copy_rate"):
        monkeypatch.setattr(f"proxima_plan.devices.{name}", lambda *_: 1e12)
    return this_machine("float32", "cpu", 1)


def test_this_machine_is_planned_as_a_run_would_compute_here(slow, here):
    config, lines = planned_config(resolve(RECIPE).config, here)
    assert (config.model.compute_dtype, config.engine.dtype) == ("float32", "float32")
    assert lines == ["model.compute_dtype and engine.dtype = float32: measured"]


def test_gpus_multiply_bfloat16(slow):
    config, lines = planned_config(resolve(RECIPE, ["engine.dtype=float32"]).config, read_devices("8xH100-80G")[0])
    assert (config.model.compute_dtype, config.engine.dtype, lines) == ("bfloat16", "float32", [])
