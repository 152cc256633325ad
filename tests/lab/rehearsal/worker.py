"""What runs in the process of rehearsals, which a fake device has changed for good."""

import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from proxima.config import resolve
from proxima.core.metrics import SumCount
from proxima.lab.rehearsal import rehearsed_step
from proxima.lab.rehearsal.device_watch import STEP, DeviceWatch
from proxima.lab.rehearsal.fake_device import fake_device
from proxima.lab.rehearsal.fake_training import StepShape
from proxima.lab.rehearsal.rehearsed_step import Rehearsal, rehearse_step
from proxima.train.objectives import SftObjective

SHAPE = StepShape(groups=4, size=2, prompt=8, length=16, updates=2)


def answer(channel: int) -> None:
    """What the process does: functions of this module, by name, until the other end is closed."""
    torch.set_num_threads(1)
    calls = Connection(channel)
    while True:
        try:
            name, arguments = calls.recv()
        except EOFError:
            os._exit(0)
        try:
            result = None, globals()[name](*arguments)
        except Exception:
            result = traceback.format_exc(), None
        calls.send(result)


def rehearsed(recipe: str, overrides: Sequence[str], shape: StepShape = SHAPE, ranks: int = 1) -> Rehearsal:
    return rehearse_step(resolve(recipe, overrides, root=None).config, shape, ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class OnTheHost(SftObjective):
    """Adds a number for each token that it has forgotten on the host."""

    def losses(self, batch: Any, outputs: Any, statistics: Any = None) -> Any:
        log_prob = outputs.need("log_prob")
        (loss,) = super().losses(batch, outputs)
        wrong: Tensor = log_prob + torch.ones(len(log_prob))
        return [type(loss)(wrong.double().sum(), loss.denominator, loss.metrics)]


@dataclass(frozen=True, kw_only=True)
class Impatient(SftObjective):
    """Reads its loss in every micro-batch, and its mask by an index."""

    def losses(self, batch: Any, outputs: Any, statistics: Any = None) -> Any:
        (loss,) = super().losses(batch, outputs)
        learnt = outputs.need("log_prob")[batch.loss_mask]
        share = float(learnt.sum())
        count = torch.tensor(share, device=batch.target.device, dtype=torch.float64)
        return [type(loss)(loss.numerator, loss.denominator, {"share": SumCount(count, count)})]


def host_states(recipe: str, overrides: Sequence[str]) -> tuple[int, int, list[str]]:
    """Bytes of a state of 2²¹ elements in host memory, of one of 4, and what waited when the device wrote them."""
    device = fake_device()
    with FakeTensorMode(allow_non_fake_inputs=True), DeviceWatch() as watch:
        torch.zeros(2**21)[0] = 1  # no state: it holds data
        watch.kind = STEP
        large, small = torch.zeros(2**21), torch.zeros(4)
        there = large.to(device)
        large.copy_(there)
        small.copy_(there[:4])
    sizes = [state.untyped_storage().nbytes() for state in (large, small)]
    return *sizes, [wait.what for wait in watch.waits]


def rehearsed_with(recipe: str, overrides: Sequence[str], objective: Any) -> Rehearsal:
    """With another objective in place of the recipe's."""
    before = rehearsed_step.trainings
    rehearsed_step.trainings = lambda *given: [_with(part, objective) for part in before(*given)]
    try:
        return rehearsed(recipe, overrides)
    finally:
        rehearsed_step.trainings = before


def _with(part: Any, objective: Any) -> Any:
    return type(part)(part.name, part.stack, objective, part.stages)
