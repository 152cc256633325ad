"""A recipe on given devices: what a rehearsed step needs of each, whether it fits, and what to change if not."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any

from proxima.config import resolve
from proxima.config.estimate import Estimates
from proxima.config.memory_size import ENGINE, HANDED, AnyConfig
from proxima.config.resolved import Resolved
from proxima.config.schema import RunConfig
from proxima.config.step_size import ExampleStep, StepSize
from proxima.config.training_memory import Share
from proxima.data import UserError
from proxima.lab.plan.device_memory import CONTEXT, FRAGMENTED
from proxima.lab.plan.devices import Devices
from proxima.lab.rehearsal.fake_training import StepShape
from proxima.lab.rehearsal.rehearsed_step import GRADIENTS, MOMENTS, WEIGHTS, Rehearsal, rehearse_step
from proxima.model.parallel.sharding import Sharding
from proxima.runtime.launch.models import sharding_of

MICRO_BATCHES = 2  # of a rehearsed update: the second adds to existing gradients, and further ones are like it
STEADY = (WEIGHTS, GRADIENTS, MOMENTS)  # memory that is split among the ranks


@dataclass(frozen=True)
class Saving:
    """An override on the command line, and the approximate number of bytes that one device then needs."""

    word: str
    needed: int


Resolve = Callable[[str], Resolved[Any]]
"""Resolves the recipe with one more override."""


@dataclass(frozen=True)
class DeviceFit:
    """The memory that one device needs, and whether it has that much.

    Args:
        rehearsal: the measurements. devices: the devices that the step should fit.
        engine: bytes of the parts that were not rehearsed, as estimated by `explain`.
        estimate: the estimate of `explain` for the rehearsed parts; None if it has no estimate.
        advice: changes, the best first; empty if the step fits.
    """

    rehearsal: Rehearsal
    devices: Devices
    engine: int
    estimate: int | None
    advice: tuple[Saving, ...] = ()

    @property
    def needed(self) -> int:
        """Bytes needed on one device, including those of CUDA itself."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """The needed bytes by use; `needed` is their sum."""
        engine = {"engine (estimated)": self.engine} if self.engine else {}
        fragments = math.ceil((self.rehearsal.peak + self.engine) * FRAGMENTED)
        return self.rehearsal.peak_bytes | engine | {"fragments": fragments, "CUDA itself": CONTEXT}

    @property
    def fits(self) -> bool:
        return self.needed <= self.devices.memory

    @property
    def passed(self) -> bool:
        return self.fits and not self.rehearsal.faults

    def as_json(self) -> dict[str, Any]:
        rehearsal = self.rehearsal
        return {
            "devices": str(self.devices),
            "memory": self.devices.memory,
            "needed": self.needed,
            "fits": self.fits,
            "peak": rehearsal.peak_bytes,
            "engine": self.engine,
            "estimate": self.estimate,
            "faults": rehearsal.faults,
            "updates": rehearsal.updates,
            "micro_batches": rehearsal.micro_batches,
            "waits": [asdict(wait) | {"count": count} for wait, count in rehearsal.waits.items()],
            "advice": [asdict(change) for change in self.advice],
            "seconds": rehearsal.seconds,
        }


def rehearse_fit(resolved: Resolved[Any], devices: Devices, again: Resolve) -> DeviceFit:
    """Rehearse a recipe for one of these devices, with the weights sharded over all; `again` resolves it with a change.

    Raises:
        UserError: the config of the model can't be read.
    """
    config: AnyConfig = resolved.config
    share = _share(config, devices.count)
    estimates = Estimates(resolved, gemm=1e12, share=share)  # no time is asked for
    rehearsal = rehearse_step(config, shape_of(config, estimates.batch, share.shares), ranks=devices.count)
    memory = {name: size for name, size in (estimates.memory or {}).items() if name not in HANDED}
    beside = {name: size for name, size in memory.items() if name in ENGINE}
    estimate = sum(memory.values()) - sum(beside.values()) if memory else None
    fit = DeviceFit(rehearsal, devices, sum(beside.values()), estimate)
    return fit if fit.fits else replace(fit, advice=tuple(changes_of(resolved, again, fit)))


def rehearse_recipe(recipe: str, overrides: Sequence[str], devices: Devices, *, import_code: bool = False) -> DeviceFit:
    """Run `rehearse_fit` in a separate process, because a fake device can't be unregistered.

    Raises:
        UserError: the config of the model can't be read.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        outcome = pool.submit(_outcome, recipe, list(overrides), devices, import_code).result()
    if isinstance(outcome, str):
        raise UserError(outcome)
    return outcome


def _outcome(recipe: str, overrides: Sequence[str], devices: Devices, import_code: bool) -> DeviceFit | str:
    """Return the fit of the recipe, or the message of the error that prevents the rehearsal."""
    try:
        resolved = resolve(recipe, overrides, root=None, import_code=import_code)
        return rehearse_fit(
            resolved, devices, lambda word: resolve(recipe, [*overrides, word], root=None, import_code=import_code)
        )
    except UserError as error:  # its fields can't be passed between processes
        return str(error)


def shape_of(config: AnyConfig, batch: StepSize | ExampleStep, shares: int = 1) -> StepShape:
    """Return the shape of one of `shares` parts of a step: full micro-batches, and no more of them than necessary."""
    budget = config.train.tokens_per_micro_batch
    if isinstance(batch, StepSize) and isinstance(config, RunConfig):
        length = config.sampling.max_tokens
        prompt, wanted = max(1, batch.longest - length), batch.kept or batch.completions
        updates = min(2, batch.updates)
    else:
        prompt = max(1, batch.longest // 2)
        length, updates = max(1, batch.longest - prompt), 1
        wanted = 1 if config_is_single(config) else 2
    tokens = MICRO_BATCHES * max(budget, prompt + length)
    size = min(wanted, max(2, math.ceil(tokens / length)))
    groups = max(1, math.ceil(tokens / (prompt + size * length)))
    if isinstance(batch, ExampleStep):
        most = batch.examples
    else:
        most = batch.prompts // getattr(config.train, "updates_per_step", 1)
    most = math.ceil(most / shares)
    return StepShape(groups=max(1, min(groups, most)), size=size, prompt=prompt, length=length, updates=updates)


def config_is_single(config: Any) -> bool:
    """Return True if an example is one sequence, not a pair."""
    from proxima.config.families import command_of

    return command_of(config) == "sft" or (command_of(config) == "dpo" and config.preference.kto is not None)


def changes_of(resolved: Resolved[Any], again: Resolve, fit: DeviceFit) -> list[Saving]:
    """Return overrides that need less memory, the one that costs the least time first. The memory with an override is
    the rehearsed one minus the saving that `explain` estimates."""
    config: AnyConfig = resolved.config
    budget, slots = config.train.tokens_per_micro_batch, getattr(getattr(config, "engine", None), "slots", 0) or 0
    words = [f"engine.slots={slots // 2}"] if slots > 1 else []
    words += [f"train.tokens_per_micro_batch={budget // 2}"] if budget > 256 else []
    words += ["model.gradient_checkpointing=true"]
    sharding = "placement={kind: torchrun, sharding: {%s}}" if sharding_of(config) is None else "placement.sharding.%s"
    if fit.devices.count > 1:
        whole = sharding.startswith("placement={")
        options = {"param_dtype": "bfloat16", "offload": "true"}
        words += [sharding % f"{name}{': ' if whole else '='}{value}" for name, value in options.items()]
    words += [] if config.model.lora is not None else ["model.lora={rank: 16}"]
    count, out = fit.devices.count, list[Saving]()
    before = _reckoned(resolved, count)
    for word in words:
        try:
            other = again(word)
        except UserError:
            continue  # the recipe does not permit it
        if (saved := before - _reckoned(other, count)) > 0.01 * fit.needed:
            out.append(Saving(word, max(CONTEXT, fit.needed - math.ceil(saved * (1 + FRAGMENTED)))))
    steady = sum(fit.rehearsal.peak_bytes.get(kind, 0) for kind in STEADY)
    left = fit.devices.memory - (fit.needed - steady)
    if left > 0 and (more := math.ceil(steady * count / left)) > count:
        out.append(Saving(f"--devices {more}x{fit.devices.name}", fit.needed - steady + steady * count // more))
    return out


def _reckoned(resolved: Resolved[Any], ranks: int) -> int:
    estimates = Estimates(resolved, gemm=1e12, share=_share(resolved.config, ranks))
    return sum((estimates.memory or {}).values())


def _share(config: AnyConfig, ranks: int) -> Share:
    return Share(ranks, (sharding_of(config) or Sharding()) if ranks > 1 else None)
