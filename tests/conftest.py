"""Fixtures that every folder of tests may use."""

import os
from collections.abc import Callable
from pathlib import Path

# Before torch is imported: tests run side by side, and two processes with two threads each wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import HealthCheck, settings

# The clock says nothing about correctness, and a failure that comes and goes teaches nobody.
settings.register_profile("proxima", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("proxima")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(kind, seed=0)`: a Hugging Face folder with random weights, read-only by agreement; see
    tests/tiny.py."""
    from tests.tiny import tiny_factory

    return tiny_factory(tmp_path_factory.mktemp("tiny"))
