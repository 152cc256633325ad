"""The best layouts of a recipe on given devices, as overrides for the command line."""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from proxima.config.problems import ConfigError
from proxima.config.resolution import resolve
from proxima.config.resolved import Resolved
from proxima.data import FieldError, UserError
from proxima.model.parallel.sharding import Sharding
from proxima.training import OPTIMIZERS
from proxima_plan.devices import Devices
from proxima_plan.engine_settings import GPU_MEMORY, EngineSettings, kept_arguments
from proxima_plan.forecast import PlannedRecipe, StepPlan, generating, plan_recipe
from proxima_plan.layout import DeviceLayout
from proxima_plan.step_load import Load

SHOWN = 5
CHECKPOINTING = "model.gradient_checkpointing=true"
EIGHT_BITS = "train.optimizer.kind=adamw_8bit"
MOMENTS_OFFLOADED = "train.optimizer.offload=true"
STATES_OFFLOADED = "placement.sharding.offload=true"
SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)  # of the devices, for engines that are separate from the ranks
GROUPS = (1, 2, 4, 8, 16, 32, 64)


def proposals(resolved: Resolved[Any], devices: Devices, mean: float | None = None) -> list[StepPlan]:
    """Return the plans of the fastest layouts that fit, the best first. If the recipe does not overlap generation and
    training, the last one is that of the fastest layout that does, provided it is faster than all others.

    Raises:
        UserError: the recipe does not generate or can't be planned, or no layout fits.
    """
    generating(resolved, "--propose")
    planned = PlannedRecipe.of(resolved, devices, mean)
    load = replace(planned.load, engine=proposed_engine(planned.load.engine))
    planned = replace(planned, load=load)
    shares = [0.0]
    if load.lag:
        shares += SHARES
    fitting = fastest(planned, load, shares)
    if not fitting:
        raise UserError(
            f"no layout of {resolved.config.model.path} fits {devices}", remedy="take more devices or larger ones"
        )
    separate = []
    if not load.lag:
        separate = fastest(planned, replace(load, lag=1), SHARES)[:1]
    return fitting[:SHOWN] + [plan for plan in separate if plan.seconds < fitting[0].seconds]


def remedies(
    resolved: Resolved[Any], overrides: Sequence[str], devices: Devices, mean: float | None = None
) -> tuple[list[str], StepPlan] | None:
    """Return the words with which a recipe that does not fit its layout would, and its plan with them: recomputed
    layers, then also sharded weights, then moments of 8 bits, then moments in host memory, then all states there. The
    first that leaves room is returned; None if none does."""
    for words in _sets_of_words(resolved.config, devices):
        with suppress(ConfigError, FieldError, UserError):
            set_again = {word.partition("=")[0] for word in words}
            kept = [word for word in overrides if word.partition("=")[0] not in set_again]
            changed = resolve(str(resolved.recipe), [*kept, *words], root=None, import_code=resolved.import_code)
            plan = plan_recipe(changed, devices, mean=mean)
            if plan.memory.roomy:
                return words, plan
    return None


def _sets_of_words(config: Any, devices: Devices) -> Iterator[list[str]]:
    """Yield the words of `remedies`, in order, without those that change nothing."""
    words = list[str]()
    if not config.model.gradient_checkpointing:
        words = [CHECKPOINTING]
        yield words
    sharding = getattr(config.placement, "sharding", None)
    if devices.count > 1:
        fields = {"kind": "full", "param_dtype": "bfloat16"}
        changed = [name for name, value in fields.items() if getattr(sharding, name, None) != value]
        if changed:
            started = []
            if sharding is None:
                started = ["placement=torchrun"]
            words = [*words, *started, *(f"placement.sharding.{name}={fields[name]}" for name in changed)]
            yield words
    optimizer = config.train.optimizer
    if OPTIMIZERS.holds(optimizer, "adamw") and config.model.lora is None and not optimizer.offload:
        yield [*words, EIGHT_BITS]
        yield [*words, MOMENTS_OFFLOADED]
    if devices.count > 1 and not getattr(sharding, "offload", False):
        yield [*words, STATES_OFFLOADED]


def proposed_engine(engine: EngineSettings) -> EngineSettings:
    """The servers of a proposal: the recipe's, or vLLM's in place of an engine in the process. They split their weights
    over all their devices, and the plan chooses their share of each."""
    if not engine.served:
        return EngineSettings()
    return replace(engine, share=None, source=GPU_MEMORY, split=0, copies=1, cache=None, remote=False)


def fastest(planned: PlannedRecipe, load: Load, shares: Sequence[float]) -> list[StepPlan]:
    """Return the layouts that fit, the fastest first, one for each number of ranks and size of engines. `shares`: see
    `layouts`."""
    devices = planned.devices
    node = planned.devices.kind.node
    shardings = list(group_sizes(min(devices.count, node)))
    sizes = [n for n in GROUPS if n <= min(8, node)]
    plans = [plan for plan in planned.plans(layouts(devices, shardings, sizes, shares), load) if plan.memory.roomy]
    plans.sort(key=lambda plan: (-round(plan.seconds, 1), -plan.layout.sharding.ranks_per_share))
    best = {(plan.layout.engine_devices, plan.layout.ranks): plan for plan in plans}  # the last one of each
    return sorted(best.values(), key=lambda plan: round(plan.seconds, 1))


def group_sizes(node: int) -> Iterator[Sharding]:
    """Yield group sizes that are powers of two, within a node except for expert groups."""
    sizes = [size for size in GROUPS if size <= node]
    for tensor, context, expert in product([size for size in sizes if size <= 8], sizes, GROUPS):
        if tensor * context <= node:
            groups: dict[str, Any] = {"tensor_parallel": tensor, "context_parallel": context, "expert_parallel": expert}
            yield Sharding(param_dtype="bfloat16", **groups)


def layouts(
    devices: Devices, shardings: Sequence[Sharding], sizes: Sequence[int], shares: Sequence[float]
) -> Iterator[DeviceLayout]:
    """Yield the layouts that divide the devices.

    Args:
        sizes: devices of an engine.
        shares: of the devices that are for engines alone; 0: engines share the devices of the ranks.
    """
    for share, each, sharding in product(shares, sizes, shardings):
        engines = round(devices.count * (share or 1.0)) // each
        ranks = devices.count - engines * each * bool(share)
        whole = ranks and ranks % sharding.ranks_per_share == 0
        whole = whole and ranks // sharding.tensor_parallel % sharding.expert_parallel == 0
        if engines and whole and (share or devices.count % each == 0):
            yield DeviceLayout(ranks, sharding, engines, each, colocated=not share, node=devices.kind.node)


def words_of(plan: StepPlan, resolved: Resolved[Any]) -> tuple[str, ...]:
    """Return the command-line overrides that set a layout."""
    layout = plan.layout
    sharding = plan.layout.sharding
    config = resolved.config
    fields = {"kind": "ray", "ranks": layout.ranks, "engines": layout.engines}
    if layout.colocated:
        fields["colocate"] = "true"
    else:
        fields["gpus_per_engine"] = layout.engine_devices
    for name in ("tensor_parallel", "context_parallel", "expert_parallel"):
        size = getattr(sharding, name)
        if size > 1:
            fields[name] = size
    inside = ", ".join(f"{name}: {value}" for name, value in fields.items())
    words = [f"'placement={{{inside}, sharding: {{kind: full, param_dtype: bfloat16}}}}'"]
    if not hasattr(config.engine, "urls"):
        words.append("engine=vllm")
    if plan.memory.share:
        words.append(f"{GPU_MEMORY}={plan.memory.share:g}")
    serve = getattr(config.engine, "serve", None)
    given = []
    if serve is not None:
        given = kept_arguments(serve.arguments)
    if layout.engine_devices > 1:
        given += ["--tensor-parallel-size", str(layout.engine_devices)]
    if given or (serve is not None and serve.arguments):
        words.append(shlex.quote(f"engine.serve.arguments={json.dumps(given)}"))
    if plan.load.lag and not config.runtime.overlaps:
        words += ["runtime.max_lag=1", f"runtime.max_concurrent_rollouts={2 * config.train.prompts_per_step}"]
    return tuple(words)
