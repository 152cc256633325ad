"""Only a GPU's allocator is set, and not over the user's settings."""

import pytest
import torch

from proxima.model import device_segments
from proxima.model.device_segments import grow_segments


@pytest.fixture
def given(monkeypatch):
    """What the allocator is told, in an environment that sets nothing."""
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    for name in device_segments.SET_BY_USER:
        monkeypatch.delenv(name, raising=False)
    return told


def test_segments_grow_on_a_gpu(given):
    assert not grow_segments(torch.device("cpu")) and not given
    assert grow_segments(torch.device("cuda", 1)) and given == ["expandable_segments:True"]


@pytest.mark.parametrize("name", device_segments.SET_BY_USER)
def test_the_settings_of_the_environment_stay(given, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert not grow_segments(torch.device("cuda")) and not given
