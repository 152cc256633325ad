"""The best layouts of a recipe on given devices, as overrides for the command line."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from proxima.config.resolved import Resolved
from proxima.data import FieldError, UserError
from proxima.lab.plan.device_memory import device_memory
from proxima.lab.plan.devices import Devices
from proxima.lab.plan.layout import DeviceLayout
from proxima.lab.plan.step_load import StepLoad
from proxima.lab.plan.step_plan import PlannedRecipe, StepPlan, generation
from proxima.model.parallel.sharding import Sharding

SHOWN = 5
LESS = 0.9  # a slower layout is shown if it needs less than this share of a faster one's memory
ENGINE_SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)  # of the devices, for engines that are separate from the ranks
GROUPS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Proposal:
    """A plan, and the overrides that set its layout."""

    plan: StepPlan
    words: tuple[str, ...]


def proposals(resolved: Resolved[Any], devices: Devices, mean: float | None = None) -> list[Proposal]:
    """Return the fastest layouts that fit, the best first. If the recipe does not overlap generation and training, the
    last one is the fastest layout that does, provided it is faster than all others.

    Raises:
        UserError: the recipe can't be planned, or no layout fits.
    """
    planned = PlannedRecipe.of(resolved, devices, mean)
    if not hasattr(resolved.config.engine, "urls"):
        planned = replace(planned, load=replace(planned.load, slots=None))  # slots of the engine that is replaced
    fitting = list(_best(planned, devices, planned.load))
    if not fitting:
        raise UserError(
            f"no layout of {resolved.config.model.path} fits {devices}", remedy="take more devices or larger ones"
        )
    shown = [Proposal(plan, words_of(plan, resolved)) for plan in fitting[:SHOWN]]
    if not planned.load.lag:
        ahead = replace(planned.load, lag=1)
        for plan in _best(planned, devices, ahead, separate_only=True):
            if plan.seconds < fitting[0].seconds:
                shown.append(Proposal(plan, words_of(plan, resolved)))
            break
    return shown


def _best(planned: PlannedRecipe, devices: Devices, load: StepLoad, *, separate_only: bool = False) -> list[StepPlan]:
    """Return the layouts that fit, the fastest first; a slower one only if its ranks need less memory than all faster
    ones, or if its engines differ from theirs."""
    generate = cache(generation)
    plans = []
    for layout in layouts(devices, overlaps=load.lag > 0):
        if separate_only and layout.colocated:
            continue
        try:
            planned.check(layout)
        except FieldError:
            continue
        memory = device_memory(planned.spec, planned.model, layout, load, devices.kind)
        if memory.fits:
            plans.append(planned.plan(layout, load, memory=memory, generate=generate))
    plans.sort(key=lambda plan: (round(plan.seconds, 1), plan.layout.sharding.together))
    kept: list[StepPlan] = []
    for plan in plans:
        held = sum(plan.memory.trainer.values())
        least = min((sum(other.memory.trainer.values()) for other in kept), default=math.inf)
        engines = {(other.layout.engine_devices, other.layout.ranks) for other in kept}
        if held < LESS * least or (plan.layout.engine_devices, plan.layout.ranks) not in engines:
            kept.append(plan)
    return kept


def layouts(devices: Devices, *, overlaps: bool) -> Iterator[DeviceLayout]:
    """Yield layouts with group sizes that are powers of two, within a node except for expert groups. Engines share the
    devices of the ranks; if generation and training overlap, layouts with separate engines follow."""
    count, node = devices.count, devices.kind.node
    sizes = [size for size in GROUPS if size <= min(count, node)]
    shares = [0.0, *(share for share in ENGINE_SHARES if overlaps)]
    for share in shares:
        for each in (size for size in sizes if size <= 8):
            engines = round(count * share) // each if share else count // each
            ranks = count - engines * each if share else count
            if not engines or ranks < 1 or (not share and count % each):
                continue
            for tensor in (size for size in sizes if size <= 8 and ranks % size == 0):
                for context in (size for size in sizes if size * tensor <= node and ranks % (tensor * size) == 0):
                    for expert in (size for size in GROUPS if (ranks // tensor) % size == 0):
                        sharding = Sharding(
                            param_dtype="bfloat16",
                            tensor_parallel=tensor,
                            context_parallel=context,
                            expert_parallel=expert,
                        )
                        yield DeviceLayout(ranks, sharding, engines, each, colocated=not share)


def words_of(plan: StepPlan, resolved: Resolved[Any]) -> tuple[str, ...]:
    """Return the command-line overrides that set a layout."""
    layout, sharding, config = plan.layout, plan.layout.sharding, resolved.config
    fields = {"kind": "ray", "ranks": layout.ranks, "engines": layout.engines}
    fields |= {"colocate": "true"} if layout.colocated else {"gpus_per_engine": layout.engine_devices}
    for name in ("tensor_parallel", "context_parallel", "expert_parallel"):
        if (size := getattr(sharding, name)) > 1:
            fields[name] = size
    inside = ", ".join(f"{name}: {value}" for name, value in fields.items())
    words = [f"'placement={{{inside}, sharding: {{kind: full, param_dtype: bfloat16}}}}'"]
    if not hasattr(config.engine, "urls"):
        words.append("engine=vllm")
    if layout.engine_devices > 1:
        words.append(f"'engine.serve={{arguments: [--tensor-parallel-size, \"{layout.engine_devices}\"]}}'")
    if plan.load.lag and not config.runtime.overlaps:
        words += ["runtime.max_lag=1", f"runtime.max_concurrent_rollouts={2 * config.train.prompts_per_step}"]
    return tuple(words)
