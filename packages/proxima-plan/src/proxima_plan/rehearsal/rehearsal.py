"""Whole steps of a config on a fake device: finds tensors on the wrong device, and the peak of live bytes."""

import math
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path, PurePath
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from proxima.config.batch_arithmetic import BatchArithmetic, ExampleStep, GroupStep
from proxima.config.families import family_name
from proxima.config.outcomes import decided_on_gpus
from proxima.config.resolution import resolve
from proxima.config.sections.data import longest_completion
from proxima.data import UserError
from proxima.data.trajectory import Trajectory
from proxima.model.parallel.sharding import Sharding
from proxima_plan.memory import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS
from proxima_plan.rehearsal.device_watch import STEP, DeviceWatch
from proxima_plan.rehearsal.fake_device import fake_device
from proxima_plan.rehearsal.fake_ranks import fake_ranks, whole_gradients
from proxima_plan.rehearsal.fake_training import FakeLoader, StepShape, Training, fake_items, trainings

MICRO_BATCHES = 2  # of a rehearsed update: the second adds to existing gradients, and further ones are like it
FIRST = StepShape(groups=1, size=2, prompt=4, length=4)  # of the step that creates the moments


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal.

    Args:
        peak_bytes: peak of the live bytes on the device in a step after the first, by kind.
        waits: the number of times that the host waits for the device in that step, by operation.
        seconds: duration of the rehearsal.
    """

    peak_bytes: dict[str, int]
    waits: dict[str, int]
    seconds: float

    @property
    def peak(self) -> int:
        return sum(self.peak_bytes.values())


def rehearse_recipe(recipe: str, overrides: Sequence[str], ranks: int, *, import_code: bool = False) -> Rehearsal:
    """Rehearse a step in a separate process, because a fake device can't be unregistered.

    Raises:
        UserError: the config of the model can't be read, or the step would fail.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        outcome = pool.submit(_outcome, recipe, list(overrides), ranks, import_code).result()
    if isinstance(outcome, str):
        raise UserError(outcome)
    return outcome


def _outcome(recipe: str, overrides: Sequence[str], ranks: int, import_code: bool) -> Rehearsal | str:
    """Return the rehearsal, or the message of the error that prevents it."""
    try:
        resolved = resolve(recipe, overrides, root=None, import_code=import_code)
        sharding = _sharding(resolved.config, ranks)
        shares = ranks if sharding is None else ranks // sharding.ranks_per_share
        shape = shape_of(resolved.config, BatchArithmetic(resolved).batch, shares)
        return rehearse_step(resolved.config, shape, ranks)
    except UserError as error:  # its fields can't be passed between processes
        return str(error)


def _sharding(config: Any, ranks: int) -> Sharding | None:
    if ranks == 1:
        return None
    return config.model.source(placement=config.placement).sharding or Sharding()


def shape_of(config: Any, batch: GroupStep | ExampleStep, shares: int = 1) -> StepShape:
    """Return the shape of one of `shares` parts of a step: full micro-batches, and no more of them than necessary."""
    if isinstance(batch, GroupStep):
        length = longest_completion(config.task, config.sampling)
        updates = min(2, batch.updates)
        prompt = max(1, batch.longest - length)
        wanted = batch.kept or batch.completions
        most = batch.prompts // config.train.updates_per_step
    else:
        prompt = max(1, batch.longest // 2)
        updates = 1
        most = batch.examples
        length = max(1, batch.longest - prompt)
        wanted = 1 if _is_single(config) else 2
    tokens = MICRO_BATCHES * max(config.train.tokens_per_micro_batch, prompt + length)
    size = min(wanted, max(2, math.ceil(tokens / length)))
    groups = min(math.ceil(tokens / (prompt + size * length)), math.ceil(most / shares))
    return StepShape(groups=max(1, groups), size=size, prompt=prompt, length=length, updates=updates)


def _is_single(config: Any) -> bool:
    """Return True if an example is one sequence, not a pair."""
    return family_name(config) == "sft" or (family_name(config) == "dpo" and config.preference.kto is not None)


def rehearse_step(config: Any, shape: StepShape, ranks: int = 1, watch: DeviceWatch | None = None) -> Rehearsal:
    """Rehearse two steps of a config and report the second; the first creates the optimizer's moments. It changes this
    process permanently.

    Args:
        watch: None: a new one.

    Raises:
        UserError: the config of the model can't be read; or a step fails, e.g. because a tensor is on the wrong device:
            the exception, with the line of our code.
    """
    config = decided_on_gpus(config)  # as which the fake device behaves
    start = time.perf_counter()
    device = fake_device()
    sharding = _sharding(config, ranks)
    together = 1 if sharding is None else sharding.ranks_per_share
    watch = watch or DeviceWatch()
    with fake_ranks(ranks, together) as group, FakeTensorMode(allow_non_fake_inputs=True), watch:
        watch.kind = WEIGHTS
        parts = trainings(config, FakeLoader(config.model.path, device, group, sharding))
        for part in parts:
            _label(watch, part)
        try:
            for part in parts:
                _rehearse(watch, part, fake_items(config, part, FIRST, group.shares), 1)
            watch.restart()
            for part in parts:
                _rehearse(watch, part, fake_items(config, part, shape, group.shares), shape.updates)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"the rehearsal failed: {_located(error)}") from error
    peak = {kind: size for kind, size in watch.bytes.peak.items() if size > 0}
    return Rehearsal(peak, dict(watch.waits), time.perf_counter() - start)


def _rehearse(watch: DeviceWatch, part: Training, items: Sequence[Any], updates: int) -> None:
    watch.kind = ACTIVATIONS
    run_part(part, [items] * updates)
    watch.kind = WEIGHTS


def _label(watch: DeviceWatch, part: Training) -> None:
    """Register hooks that count gradients and optimizer tensors separately from activations."""
    for parameter in part.stack.parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: watch.relabel([p.grad], GRADIENTS))
    optimizer = part.stack.optimizer
    model = part.stack.model
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
        for slots in optimizer.state.values():
            watch.relabel(list(slots.values()), OPTIMIZER)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def run_part(part: Training, updates: Sequence[Sequence[Any]]) -> None:
    """Run the forward stages and the updates of one part of a step, as `Learner.update` does."""
    if part.stages:
        filled = _filled(part, updates[0])
        updates = [filled] * len(updates)
    part.stack.update(part.objective, updates, planned=len(updates))


def _filled(part: Training, items: Sequence[Any]) -> list[Any]:
    """Return the items with the columns of the stages filled."""
    if isinstance(items[0], Trajectory):
        return part.stack.fill(part.stages, items)
    sides = [side for item in items for side in item.sides]
    filled = iter(part.stack.fill(part.stages, sides))
    return [item.with_sides([next(filled) for _ in item.sides]) for item in items]


def _located(error: Exception) -> str:
    """Describe the error with the innermost line of our own code."""
    here = Path(__file__).parent
    foreign = ("site-packages", "lib")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if PurePath(frame.filename).parent != here and not {*PurePath(frame.filename).parts}.intersection(foreign)
    ]
    place = ""
    if frames:
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: "
    line = next((text for text in str(error).splitlines() if text.strip()), type(error).__name__)
    return f"{place}{line}"
