"""8-bit AdamW against torchao's own, the bytes of its state, and which weights it quantises."""

import importlib.util

import pytest
import torch
from torch import nn

from proxima.data import UserError
from proxima.train import optimizer_8bit
from proxima.train.optimizer_8bit import AdamW8bit, block_of

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


def stepped(build, shapes, steps=4):
    draw = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]
    optimizer = build(weights)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=draw)
        optimizer.step()
    return weights, optimizer


@needs_torchao
def test_blocks_of_whole_rows_are_torchao_s(monkeypatch):
    from torchao.optim import AdamW8bit as Theirs

    monkeypatch.setattr(optimizer_8bit, "AT_ONCE", 5 * 512)  # five rows at a time
    spec, shapes = AdamW8bit(lr=1e-3, weight_decay=0.1), [(24, 512), (8, 256), (300,)]
    ours, optimizer = stepped(spec.build, shapes)

    def build(weights):
        groups = [{"params": weights[:2], "weight_decay": 0.1}, {"params": weights[2:], "weight_decay": 0.0}]
        return Theirs(groups, lr=1e-3)

    with torch.compiler.set_stance("force_eager"):
        theirs, peer = stepped(build, shapes)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
    codes = peer.state[theirs[0]]["exp_avg"].codes
    assert torch.equal(optimizer.state[ours[0]]["exp_avg"], codes) and codes.dtype == torch.uint8


@needs_torchao
def test_near_adamw_at_a_quarter_of_its_bytes():
    shapes = [(96, 512), (64, 384)]
    ours, optimizer = stepped(AdamW8bit(lr=1e-3).build, shapes, steps=20)
    theirs, _ = stepped(lambda weights: torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.0), shapes, steps=20)
    start, _ = stepped(AdamW8bit(lr=0.0).build, shapes, steps=20)
    for mine, other, first in zip(ours, theirs, start, strict=True):
        assert 0 < float((mine - other).detach().norm()) < 0.1 * float((other - first).detach().norm())
    held = sum(x.numel() * x.element_size() for slots in optimizer.state.values() for x in slots.values() if x.dim())
    weights = sum(weight.numel() for weight in ours)
    assert 2 * weights < held < 2.1 * weights


@needs_torchao
def test_weights_that_are_not_quantised_step_as_adamw():
    shapes = [(63, 64), (128, 80), (7,), ()]
    ours, optimizer = stepped(AdamW8bit(lr=1e-2).build, shapes)
    theirs, _ = stepped(lambda weights: torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.0), shapes)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
        assert set(optimizer.state[mine]) == {"step", "exp_avg", "exp_avg_sq"}


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
