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

MICRO_BATCHES = 2  # of a rehearsed update: the second finds gradients, and there is no third kind
STEADY = (WEIGHTS, GRADIENTS, MOMENTS)  # what more ranks share


@dataclass(frozen=True)
class Saving:
    """A word of the command line, and the bytes that one device then needs, about."""

    word: str
    needed: int


Resolve = Callable[[str], Resolved[Any]]
"""The recipe with one more word."""


@dataclass(frozen=True)
class DeviceFit:
    """The memory that one device needs.

    Args:
        rehearsal: what was measured. devices: what it is measured against.
        engine: bytes of what was not rehearsed, as `explain` reckons them.
        estimate: what `explain` reckons for what was rehearsed; None where it can't.
        advice: what to change, the best first; empty where it fits.
    """

    rehearsal: Rehearsal
    devices: Devices
    engine: int
    estimate: int | None
    advice: tuple[Saving, ...] = ()

    @property
    def needed(self) -> int:
        """Bytes of one device, with what CUDA itself takes."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by what they hold; their sum is what is needed."""
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
    """Rehearse a recipe for one of these devices, the weights spread over all of them; `again` resolves it changed.

    Raises:
        UserError: its model's config can't be read.
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
    """`rehearse_fit` in a process of its own: a fake device stays in its process for good.

    Raises:
        UserError: its model's config can't be read.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        outcome = pool.submit(_outcome, recipe, list(overrides), devices, import_code).result()
    if isinstance(outcome, str):
        raise UserError(outcome)
    return outcome


def _outcome(recipe: str, overrides: Sequence[str], devices: Devices, import_code: bool) -> DeviceFit | str:
    """The fit of the recipe, or the reason why it can't be rehearsed."""
    try:
        resolved = resolve(recipe, overrides, root=None, import_code=import_code)
        return rehearse_fit(
            resolved, devices, lambda word: resolve(recipe, [*overrides, word], root=None, import_code=import_code)
        )
    except UserError as error:  # its parts do not travel between processes
        return str(error)


def shape_of(config: AnyConfig, batch: StepSize | ExampleStep, shares: int = 1) -> StepShape:
    """One of so many shares of a step, with micro-batches as full as they get, and only as many as show everything."""
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
    """True if an example is a single sequence, not a pair."""
    from proxima.config.families import command_of

    return command_of(config) == "sft" or (command_of(config) == "dpo" and config.preference.kto is not None)


def changes_of(resolved: Resolved[Any], again: Resolve, fit: DeviceFit) -> list[Saving]:
    """Changes that need less memory, as command-line overrides, the one that costs least time first. The need of each
    is the rehearsed one minus the saving that `explain` estimates."""
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
            continue  # the recipe has a reason against it
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
