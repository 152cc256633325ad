"""The dtype that `auto` becomes."""

import pytest
import torch

from proxima.model import precision
from proxima.model.precision import compute_dtype, dtype_choice

measure = precision.speed_ratio  # as it was before conftest.py fixes it


@pytest.fixture
def measured(monkeypatch):
    """measured(ratio): the choice on a CPU that multiplies bfloat16 so many times as fast as float32."""

    def choice(ratio):
        precision._measured.cache_clear()
        monkeypatch.setattr(precision, "speed_ratio", lambda: ratio)
        return dtype_choice("cpu")

    return choice


@pytest.mark.parametrize(
    ("ratio", "dtype", "shown"),
    [
        (2.4, "bfloat16", "2.4"),
        (1.0, "bfloat16", "1"),
        (0.95, "bfloat16", "0.95"),  # within the margin
        (0.43, "float32", "0.43"),
        (0.066, "float32", "0.066"),
    ],
)
def test_float32_must_be_clearly_faster(measured, ratio, dtype, shown):
    choice = measured(ratio)
    halved = ", and halve the caches" * (dtype == "bfloat16" and ratio < 1)
    reason = f"bfloat16 products are {shown} × as fast on this processor{halved}"
    assert (choice.dtype, choice.reason) == (dtype, reason)


def test_a_process_decides_once(measured, monkeypatch):
    first = measured(0.2)
    monkeypatch.setattr(precision, "speed_ratio", lambda: 5.0)
    assert dtype_choice("cpu") == dtype_choice("auto") == first
    assert compute_dtype("auto", torch.device("cpu")) == torch.float32


def test_what_is_named_is_taken(measured):
    measured(0.2)
    assert compute_dtype("bfloat16", "cpu") == torch.bfloat16
    assert compute_dtype("auto", "cpu", weights=torch.bfloat16) == torch.bfloat16
    measured(9.0)
    assert compute_dtype("float32", "cpu") == torch.float32


@pytest.mark.parametrize("slow", range(3))
def test_each_product_of_a_linear_layer_counts(monkeypatch, slow):
    """On AVX2 the gradient of the input alone takes most of the time."""
    seconds = {torch.float32: [1.0, 1.0, 1.0], torch.bfloat16: [0.5, 0.5, 0.5]}
    seconds[torch.bfloat16][slow] = 30.0
    kinds = []

    def best(product):
        kinds.append(product().dtype)
        number = kinds.count(kinds[-1]) - 1
        return seconds[kinds[-1]][number % 3]

    monkeypatch.setattr(precision, "_best", best)
    assert measure() == pytest.approx(3 / 31)
    assert len(kinds) == 6  # so clear a ratio is not measured with the larger matrices too


def test_a_close_ratio_is_measured_with_larger_matrices(monkeypatch):
    sizes = []

    def best(product):
        sizes.append(len(product()))
        return 1.0 if sizes[-1] == 128 else 2.0 + (len(sizes) > 9)

    monkeypatch.setattr(precision, "_best", best)
    threads = torch.get_num_threads()
    assert measure() == pytest.approx(2 / 3)
    assert sizes == [128] * 6 + [256] * 6
    assert torch.get_num_threads() == threads


def test_this_processor_is_measured():
    assert 0.001 < measure() < 1000


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_a_gpu_is_not_measured(monkeypatch, capability, dtype):
    monkeypatch.setattr(precision, "speed_ratio", lambda: pytest.fail("measured"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert dtype_choice("cuda").dtype == dtype
