"""Schedules by their numbers, the rate of a vision tower, and which settings of optimizers are refused."""

import math
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from proxima.model.architecture import vision_parameters
from proxima.model.images.image_store import ImageStore
from proxima.model.load import load
from proxima.model.policy import Policy
from proxima.training.optimizer import AdamW, Schedule
from proxima.training.optimizer_muon import Muon
from proxima.training.stack import TrainStack
from tests.tiny_images import make_tiny_reader


def factors(total, kind="constant", **settings):
    schedule = Schedule(kind, total_updates=total, **settings)
    return [schedule.factor(i) for i in range(total)]


OF_TRANSFORMERS = {  # its name, with the arguments of the end
    "constant": (("constant", {}), ("constant_with_warmup", {})),
    "linear": (("linear", {}),),
    "cosine": (("cosine", {}), ("cosine_with_min_lr", {"min_lr_rate": 0.3})),
}


@pytest.mark.parametrize("kind", get_args(get_type_hints(Schedule)["kind"]))
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (2, 0), (4, 0), (4, 1), (9, 3), (5, 4), (3, 5)])
def test_transformers_has_the_same_factors_but_for_its_idle_first_update(kind, total, warmup):
    for name, end in OF_TRANSFORMERS[kind]:
        rises = 0 if name == "constant" else warmup
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        peer = get_scheduler(name, optimizer, rises, total, end)
        theirs = []
        for _ in range(total):
            theirs.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            peer.step()
        ours = factors(total, kind=kind, warmup=rises, final_ratio=end.get("min_lr_rate", 0.0))
        assert ours[rises:] == pytest.approx(theirs[rises:], abs=1e-12)
        # Update i of the warm-up has (i + 1) / W, theirs i / W: their first update has a learning rate of 0.
        assert ours[:rises] == pytest.approx([factor + 1 / rises for factor in theirs[:rises]], abs=1e-12)
        assert min(ours) > 0


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_odd_totals(schedule):
    assert Schedule(schedule, total_updates=1).factor(0) == 1.0
    assert Schedule(schedule, total_updates=5, final_ratio=0.3).factor(9) == (
        1.0 if schedule == "constant" else pytest.approx(0.3)
    )
    assert factors(3, kind=schedule, warmup=10) == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize("optimizer", [AdamW(lr=1e-2), Muon(lr=1e-2, adamw_lr=1e-3)])
def test_a_vision_tower_has_its_share_of_the_learning_rate(optimizer, tmp_path):
    folder = str(make_tiny_reader("qwen2_vl", tmp_path))
    loaded = replace(load(folder), tokenizer=ImageStore(folder).tokenizer, vision_lr_ratio=0.25)
    stack = TrainStack(Policy(loaded), optimizer=optimizer)
    eyes = {id(p) for p in vision_parameters(stack.model.model).values()}
    rates = {True: set(), False: set()}
    for group in stack.optimizer.param_groups:
        for parameter in group["params"]:
            rates[id(parameter) in eyes].add(group["lr"])
    peak = {optimizer.lr} if isinstance(optimizer, AdamW) else {1e-2, 1e-3}
    assert rates[False] == peak and rates[True] == {0.25 * rate for rate in peak}


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        *((AdamW, "lr", -1.0), (AdamW, "beta1", 1.0), (AdamW, "beta1", -0.1), (AdamW, "beta2", 1.0)),
        *((AdamW, "eps", 0.0), (AdamW, "weight_decay", -1e-3)),
        *((Muon, "momentum", 1.0), (Muon, "adamw_lr", -1.0), (Muon, "adamw_lr", math.inf), (Muon, "lr", -1)),
    ],
)
def test_fields_are_checked(kind, field, value):
    with pytest.raises(ValueError, match=f"{field}={value!r} must be"):
        kind(**{field: value})
