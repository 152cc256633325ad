"""A state that is not of this model, or not whole, is refused before anything of it is used."""

import re

import pytest
import torch
from torch import nn

from proxima.data import UserError
from proxima.training.optimizer import WeightwiseOptimizer, restore_state
from proxima.training.optimizer_8bit import AdamW8bit, EightBitAdamW
from proxima.training.optimizer_muon import Muon
from tests.model.rows import same
from tests.training.optimizer_ranks import drawn, stepped


def state_tensors(optimizer, named):
    return {f"{key}/{name}": value for name, p in named.items() for key, value in optimizer.state[p].items()}


@pytest.fixture
def saved():
    named, optimizer = stepped(Muon())
    return named, state_tensors(optimizer, named)


def test_a_state_of_kinds_that_differ_by_weight_comes_back(saved):
    named, tensors = saved
    assert {name for name in tensors if name.startswith("momentum_buffer/")} == {
        "momentum_buffer/layers.0.a",
        "momentum_buffer/layers.0.b",
    }
    again = Muon().build_named(named.items())
    restore_state(again, named, {})  # of a run before its first update
    restore_state(again, named, tensors)
    restored = state_tensors(again, named)
    assert same(restored, tensors)


@pytest.mark.parametrize(
    ("lost", "line"),
    [
        ("momentum_buffer/layers.0.a", "'momentum_buffer/layers.0.a' (1 in all)"),
        ("exp_avg/embed", "'exp_avg/embed' (1 in all)"),
        ("step/n", "'step/n' (1 in all)"),
        ("momentum_buffer", "'momentum_buffer/layers.0.a' (2 in all)"),  # a group has no state
    ],
)
def test_what_is_missing_is_named(saved, lost, line):
    named, tensors = saved
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(lost)}
    with pytest.raises(UserError, match=re.escape(f"lacks {line}")):
        restore_state(Muon().build_named(named.items()), named, kept)


def test_another_shape_is_refused(saved):
    named, tensors = saved
    narrow = tensors | {"momentum_buffer/layers.0.a": torch.zeros(5, 512)}
    with pytest.raises(UserError, match=r"'momentum_buffer/layers\.0\.a' of shape \[5, 512\]"):
        restore_state(Muon().build_named(named.items()), named, narrow)


class WithoutTorchao(EightBitAdamW):
    """Its slots and their places."""

    def __init__(self, groups, settings):
        WeightwiseOptimizer.__init__(self, groups, settings)


@pytest.mark.parametrize("there", [2, 8, None])
def test_moments_of_8_bits_in_other_blocks_are_of_another_tensor_parallel(there):
    """More blocks or fewer, or none, because a rank's part of a row is too narrow."""
    spec, named = AdamW8bit(), {name: nn.Parameter(value) for name, value in drawn(0).items()}
    optimizer = WithoutTorchao(spec.groups(named.values()), spec.settings())
    tensors = {
        f"{slot}/{name}": torch.tensor(3.0) if slot == "step" else torch.zeros(optimizer.place(slot, p)[0])
        for name, p in named.items()
        for slot in optimizer.slots(p)
    }
    restore_state(optimizer, named, tensors)
    scale = "exp_avg_scale/layers.0.a"
    assert tensors[scale].shape == (5, 4)
    tensors[scale] = torch.zeros(5, there or 1)
    if there is None:
        del tensors[scale]
    with pytest.raises(UserError) as raised:
        restore_state(optimizer, named, tensors)
    line = "the 8-bit moments of 'layers.0.a' are in other blocks than this run's: the checkpoint was written with"
    remedy = "resume with the tensor_parallel that it was written with"
    assert str(raised.value) == f"{line} another placement.tensor_parallel, which cuts rows elsewhere; {remedy}"
