"""8-bit AdamW: the bytes of its state, and which weights it quantises; test_optimizer_step.py has torchao's."""

import importlib.util

import pytest
import torch
from torch import nn

from proxima.data import UserError
from proxima.training import optimizer_8bit
from proxima.training.optimizer import AdamW
from proxima.training.optimizer_8bit import AdamW8bit, _row_ranges, block_of
from tests.training.optimizer_ranks import stepped

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


@needs_torchao
def test_near_adamw_at_a_quarter_of_its_bytes():
    settings = {"shapes": {"a": (96, 512), "b": (64, 384)}, "steps": 20}
    (ours, optimizer), (start, _) = (stepped(AdamW8bit(lr=lr), **settings) for lr in (1e-3, 0.0))
    theirs, _ = stepped(AdamW(lr=1e-3), **settings)
    for name, other in theirs.items():
        assert 0 < float((ours[name] - other).detach().norm()) < 0.1 * float((other - start[name]).detach().norm())
    held = sum(x.numel() * x.element_size() for slots in optimizer.state.values() for x in slots.values() if x.dim())
    weights = sum(weight.numel() for weight in ours.values())
    assert 2 * weights < held < 2.1 * weights


@needs_torchao
def test_weights_that_are_not_quantised_step_as_adamw():
    shapes = {"few": (63, 64), "narrow": (128, 80), "vector": (7,), "scalar": ()}
    (ours, optimizer), (theirs, _) = (stepped(kind(lr=1e-2), shapes=shapes) for kind in (AdamW8bit, AdamW))
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name])
        assert set(optimizer.state[weight]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("shape", "block"),
    [((8, 512), 256), ((4, 8, 896), 128), ((64, 576), 64), ((200, 96), 32), ((64, 48), 0), ((63, 64), 0), ((8192,), 0)],
)
def test_a_block_lies_in_a_row(shape, block):
    assert block_of(torch.zeros(shape)) == block


@pytest.mark.parametrize(
    ("shape", "starts"),
    [
        ((10, 300), [0, 3, 6, 9]),
        ((3, 2, 500), [0, 1, 2]),
        ((2, 1001), [0, 1]),
        ((2500,), [0, 1000, 2000]),
        ((0, 3), []),
    ],
)
def test_rows_are_computed_a_thousand_elements_at_a_time(shape, starts, monkeypatch):
    """At least one row, and none of an empty slice; a scalar is computed whole."""
    monkeypatch.setattr(optimizer_8bit, "AT_ONCE", 1000)
    ranges = [*_row_ranges(torch.empty(shape))]
    assert [rows.start for rows in ranges] == starts and [rows.stop for rows in ranges[:-1]] == starts[1:]
    assert not ranges or ranges[-1].stop >= shape[0]
    assert [*_row_ranges(torch.empty(3, 0))] == [] and [*_row_ranges(torch.tensor(1.0))] == [...]


def test_without_torchao_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(optimizer_8bit, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package torchao; pip install 'proxima-rl\[low-bit\]'"):
        AdamW8bit().build([nn.Parameter(torch.zeros(2, 2))])
