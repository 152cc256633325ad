"""8-bit AdamW: the bytes of its state, and which weights it quantises; test_optimizer_step.py has torchao's."""

import importlib.util

import pytest
import torch
from torch import nn

from proxima.data import UserError
from proxima.train import AdamW, optimizer_8bit
from proxima.train.optimizer_8bit import AdamW8bit, block_of
from tests.train.optimizer_ranks import stepped

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


def test_without_torchao_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(optimizer_8bit, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package torchao; pip install 'proxima-rl\[low-bit\]'"):
        AdamW8bit().build([nn.Parameter(torch.zeros(2, 2))])
