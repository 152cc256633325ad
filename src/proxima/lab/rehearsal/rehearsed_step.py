"""Whole steps of a config on a fake device: finds tensors on the wrong device, waits, and the peak of live bytes."""

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from proxima.config.memory_size import AnyConfig
from proxima.data import Trajectory, UserError
from proxima.lab.rehearsal.device_watch import ACTIVATIONS, STEP, DeviceWatch, Wait, is_own_code, shown_place
from proxima.lab.rehearsal.fake_device import fake_device
from proxima.lab.rehearsal.fake_ranks import fake_ranks, whole_gradients
from proxima.lab.rehearsal.fake_training import Place, StepShape, Training, fake_items, trainings
from proxima.model.micro_batch import micro_batches
from proxima.model.parallel.sharding import Sharding
from proxima.runtime.launch.models import sharding_of

FIRST = StepShape(groups=1, size=2, prompt=4, length=4)  # of the step that creates the moments
WEIGHTS, GRADIENTS, MOMENTS = "weights", "gradients", "optimizer"


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal.

    Args:
        faults: exceptions with the line of our code, e.g. a tensor on the wrong device. Each ends the part it is in.
        waits: the number of waits for the device by place, in `updates` updates with `micro_batches` micro-batches in
            total.
        peak_bytes: peak of the live bytes on the device in a step after the first, by kind.
        seconds: duration of the rehearsal.
    """

    faults: tuple[str, ...]
    waits: dict[Wait, int]
    updates: int
    micro_batches: int
    peak_bytes: dict[str, int]
    seconds: float = 0.0

    @property
    def inside(self) -> int:
        """The number of waits inside micro-batches, summed over all of them."""
        return sum(count for wait, count in self.waits.items() if wait.inside)

    @property
    def peak(self) -> int:
        return sum(self.peak_bytes.values())


@dataclass
class _Rehearsed:
    faults: list[str] = field(default_factory=list)
    updates: int = 0
    micro_batches: int = 0


def rehearse_step(config: AnyConfig, shape: StepShape, *, ranks: int = 1) -> Rehearsal:
    """Rehearse two steps of a config and report the second; the first creates the optimizer's moments.

    Raises:
        UserError: the config of the model can't be read.
    """
    start, done = time.perf_counter(), _Rehearsed()
    device = fake_device()
    watch = DeviceWatch()
    sharding = None if ranks == 1 else sharding_of(config) or Sharding()
    together = 1 if sharding is None else sharding.together
    with fake_ranks(ranks, together) as group, FakeTensorMode(allow_non_fake_inputs=True), watch:
        watch.kind = WEIGHTS
        parts = trainings(config, Place(device, group, sharding))
        for part in parts:
            _label(watch, part)
        for again in range(2):
            if again:
                watch.waits.clear()
                watch.restart_peak()
                done.updates = done.micro_batches = 0
            for part in parts:
                items = fake_items(config, part, shape if again else FIRST, group.shares)
                watch.kind = ACTIVATIONS
                _step(part, [items] * (shape.updates if again else 1), done)
                watch.kind = WEIGHTS
            if done.faults:
                break
    return Rehearsal(
        faults=tuple(done.faults),
        waits=dict(sorted(watch.waits.items())),
        updates=done.updates,
        micro_batches=done.micro_batches,
        peak_bytes={kind: size for kind, size in watch.bytes.peak.items() if size > 0},
        seconds=time.perf_counter() - start,
    )


def _label(watch: DeviceWatch, part: Training) -> None:
    """Register hooks that count gradients and optimizer tensors separately from activations."""
    for parameter in part.stack.parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: watch.relabel([p.grad], GRADIENTS))
    optimizer, model = part.stack.optimizer, part.stack.model
    begin: Any = model.sync_gradients

    def sync_gradients(on: bool) -> None:  # the stack calls it before every micro-batch
        watch.relabel(whole_gradients(model.model), GRADIENTS)
        begin(on)

    vars(model)["sync_gradients"] = sync_gradients

    def before(*_: Any) -> None:
        watch.relabel([p.grad for p in part.stack.parameters], GRADIENTS)
        watch.kind = STEP

    def after(*_: Any) -> None:
        watch.kind = ACTIVATIONS
        watch.relabel([x for slots in optimizer.state.values() for x in slots.values()], MOMENTS)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _step(part: Training, updates: Sequence[Sequence[Any]], done: _Rehearsed) -> None:
    """Run the forward stages and the updates of one part of a step, as `Learner.update` does."""
    stack, objective = part.stack, part.objective
    try:
        if part.stages:
            filled = _filled(stack, part, updates[0])
            updates = [filled] * len(updates)
        result = stack.update(objective, updates, planned=len(updates))
    except UserError:
        raise
    except Exception as error:
        done.faults.append(_fault(error))
        return
    done.updates += result.updates
    shared = stack.model.share_prompt
    for items in updates:
        items = items[: len(items) // stack.ranks.shares]  # those of this rank
        sequences = [objective.sequences(item) for item in items]
        done.micro_batches += len(micro_batches(sequences, stack.tokens_per_micro_batch, share_prompt=shared))


def _filled(stack: Any, part: Training, items: Sequence[Any]) -> list[Any]:
    """Return the items with the columns of the stages filled."""
    if isinstance(items[0], Trajectory):
        return stack.fill(part.stages, items)  # type: ignore[no-any-return]
    sides = [side for item in items for side in item.sides]
    filled = iter(stack.fill(part.stages, sides))
    return [item.with_sides([next(filled) for _ in item.sides]) for item in items]


def _fault(error: Exception) -> str:
    """Describe the error with the innermost line of our own code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own_code(frame.filename)]
    place = f"{shown_place(frames[-1].filename, frames[-1].lineno or 0)}: " if frames else ""
    line = next((text for text in str(error).splitlines() if text.strip()), type(error).__name__)
    return f"{place}{line}"
