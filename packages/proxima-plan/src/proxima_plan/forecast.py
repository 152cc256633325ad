"""The forecast of a recipe's step on a layout: its stages, its memory, and its bottleneck."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from proxima.config.batch_arithmetic import BatchArithmetic, GroupStep
from proxima.config.outcomes import decided_on_gpus, dtype_outcomes, outcome_lines, settled
from proxima.config.resolved import Resolved
from proxima.config.schema import RunConfig
from proxima.config.sections import PLACEMENTS
from proxima.config.sections.data import longest_of
from proxima.config.sections.model import ModelConfig
from proxima.data import FieldError, UserError, require
from proxima.model.pretrained import resolve_device
from proxima.task.mix import sources_of
from proxima_plan.devices import CPU, GIB, MEASURED, MOST, DeviceKind, Devices, device_kinds, nearest_kind, this_machine
from proxima_plan.host_memory import host_memory
from proxima_plan.layout import DeviceLayout, check_model, placed_ranks, planned_layout
from proxima_plan.memory import DeviceMemory, device_memory, largest_micro_batch
from proxima_plan.model_size import ModelFacts, trained_model
from proxima_plan.stage_times import Sequences, Stage, StageTimes
from proxima_plan.step_load import BYTES, Load, load_of, load_of_examples

USUAL = "H100-80G"  # in place of a GPU that is not in the table: only its memory is asked for
HOPPER = ("H20", "H100", "H200", "H800")  # devices that flash attention 3 is for


@dataclass(frozen=True)
class PlannedRecipe:
    """The common part of a recipe's plans on several layouts. `config`: the model's `transformers` config, or a similar
    one. `notes`: what the figures assume."""

    model: ModelFacts
    spec: ModelConfig
    load: Load
    devices: Devices
    config: Any
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, resolved: Resolved[Any], devices: Devices, mean: float | None = None) -> "PlannedRecipe":
        """Read a recipe whose completions have `mean` tokens.

        Raises:
            UserError: its completions can't have that mean, or its model's size is unknown.
        """
        config, chosen = planned_config(resolved.config, devices)
        spread = devices.kind.rates.spread
        model, own = trained_model(config.model)
        estimate = BatchArithmetic(resolved, reads_model=own is not None)
        if isinstance(estimate.batch, GroupStep):
            assert isinstance(config, RunConfig)
            most, field = longest_of(sources_of(config.task), config.sampling)
            if mean is not None and not 1 <= mean <= most:
                raise UserError(f"--mean-length {mean:g} must be in [1, {field}={most}]")
            context = 0
            if own is not None:
                context = getattr(own.get_text_config(), "max_position_embeddings", None) or 0
            load = load_of(config, estimate.batch, model, mean, spread, context)
            estimate.notes += load.engine.notes(cpu=devices.kind.name == CPU)
        elif mean is not None:
            raise UserError("--mean-length: the recipe generates no completions; leave it out")
        else:
            load = load_of_examples(config, estimate.batch)
        compiled = bool(getattr(config.model, "compile", False))
        load = replace(load, attention=attention_path(config.model, devices.kind, load), compiled=compiled)
        estimate.notes += chosen
        if own is None:
            estimate.notes.insert(0, f"known size: that of {config.model.path} as published")
        return cls(model, config.model, load, devices, own or model.config(), tuple(estimate.notes))

    def plan(
        self, layout: DeviceLayout, load: Load | None = None, counted: Mapping[str, int] | None = None
    ) -> "StepPlan":
        """Plan a layout, with the recipe's load or another one. `counted`: bytes of a rank, from a rehearsal."""
        load = load or self.load
        memory = device_memory(self.spec, self.model, layout, load, self.devices.kind, counted)
        if layout.colocated:
            load = replace(load, lag=0)
        return StepPlan(self, layout, load, memory)

    def plans(self, layouts: Iterable[DeviceLayout], load: Load) -> list["StepPlan"]:
        """Plan those of the layouts that are possible for the model."""
        plans = []
        for layout in layouts:
            with suppress(FieldError):
                self.check(layout)
                plans.append(self.plan(layout, load))
        return plans

    def check(self, layout: DeviceLayout) -> None:
        """Raise a FieldError for a layout that is impossible for the model."""
        check_model(layout, self.config, adapters=self.spec.lora is not None)


@dataclass(frozen=True)
class StepPlan:
    """The time and memory of a step of a recipe on a layout."""

    recipe: PlannedRecipe
    layout: DeviceLayout
    load: Load
    memory: DeviceMemory

    @cached_property
    def times(self) -> StageTimes:
        """The durations of stages on this layout."""
        spec = self.recipe.spec
        gathered = BYTES[spec.dtype]
        if self.layout.sharding.param_dtype == "bfloat16":
            gathered = 2
        adapter = None if spec.lora is None else self.recipe.model.adapter or 0
        return StageTimes(
            self.recipe.model,
            self.layout,
            self.recipe.devices.kind,
            self.load,
            master=BYTES[spec.dtype],
            gathered=gathered,
            adapter=adapter,
        )

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Those of the engines and of the trainer, in order."""
        times = self.times
        load = self.load
        stages = _training(times, load)
        if load.generates:
            generated = generation(times.engine_alone(), max(1, self.memory.slots))
            stages = [generated, *stages, times.publish(), times.of_host()]
        return (*stages, times.rest())

    @property
    def seconds(self) -> float:
        """Seconds of a step: the sum of the stages or, if they overlap, the slower of the two sides."""
        if self.overlaps:
            return max(self.sides)
        return sum(self.sides)

    @property
    def overlaps(self) -> bool:
        """True if engines generate while the ranks train."""
        return self.load.lag > 0 and not self.layout.colocated

    @property
    def sides(self) -> tuple[float, float]:
        """Seconds of the engines, and of the trainer with everything else, including publication."""
        engine = sum(stage.seconds for stage in self.stages if stage.name == "generate")
        return engine, sum(stage.seconds for stage in self.stages) - engine

    @property
    def micro_batch(self) -> int:
        """Tokens of the largest micro-batch with which the plan fits; 0 if it fits with none."""
        recipe = self.recipe
        return largest_micro_batch(recipe.spec, recipe.model, self.layout, self.load, recipe.devices.kind)

    @property
    def host_memory(self) -> dict[str, int]:
        """Bytes of the host of rank 0, by kind."""
        return host_memory(self.recipe.model, self.layout, self.memory, self.load, self.recipe.devices.kind.name)

    @property
    def speed(self) -> float:
        """Tokens of completions per second and device."""
        return self.load.sequences * self.load.mean / self.seconds / self.layout.devices

    @property
    def binds(self) -> str:
        """The longest stage of the slower side, and its bottleneck."""
        engine, trainer = self.sides
        counted = [s for s in self.stages if not self.overlaps or (s.name == "generate") == (engine > trainer)]
        longest = max(counted, key=lambda stage: stage.seconds)
        return f"{longest.name}: {longest.binds}"

    def as_json(self) -> dict[str, Any]:
        fits = self.memory.fits
        seconds = self.seconds if fits else None
        speed = self.speed if fits else None
        return {
            "devices": asdict(self.recipe.devices),
            **{name: asdict(getattr(self, name)) for name in ("layout", "load", "memory")},
            "fits": fits,
            "seconds": seconds,
            "tokens_per_second_per_device": speed,
            "binds": self.binds,
            "stages": [stage._asdict() | {"seconds": stage.seconds, "binds": stage.binds} for stage in self.stages],
            "largest_micro_batch": self.micro_batch,
            "host_memory": self.host_memory,
            "notes": self.recipe.notes,
        }


def _training(times: StageTimes, load: Load) -> list[Stage]:
    """Return the stages of the ranks: forward passes, updates, and those of a critic."""
    share = load.passes / load.updates
    whole = _drawn(load, load.trained)
    part = _drawn(load, share * load.trained)
    stages = []
    if load.forwards:
        stages.append(times.forward(whole).repeated(load.forwards))
    stages.append(times.update(part).repeated(load.updates))
    if load.critic is not None:
        critic = replace(times, model=load.critic, adapter=None)
        updates = critic.update(part).repeated(load.critic_passes / share)
        values = critic.forward(whole)
        seconds = {name: value + values.parts.get(name, 0.0) for name, value in updates.parts.items()}
        stages.append(Stage("critic", seconds, updates.sent))
    return stages


@lru_cache(maxsize=1024)  # layouts of the ranks have the same sequences
def _drawn(load: Load, count: float) -> Sequences:
    """Return the sequences of an update or a pass: their sizes by the mean, and lengths of so many, drawn."""
    tokens = count * (load.mean + load.prompt_tokens)
    completions = replace(load, sequences=max(1, round(count))).lengths(round(count))
    lengths = [load.prompt_tokens + length for length in completions]
    return Sequences(tokens, tokens * load.mean_square, tuple(lengths))


@lru_cache(maxsize=1024)  # layouts of the ranks often have the same engines
def generation(times: StageTimes, slots: int) -> Stage:
    """Return the generation stage of engines with equal parts. A completion that begins when a step ends is trained on
    `lag` steps later, and that step waits for it: the completions of `lag` steps are generated in the time of these."""
    layout = times.layout
    load = times.load
    steps = load.lag if load.lag and not layout.colocated else 1
    lengths = load.lengths(max(1, round(steps * load.sequences / layout.engines)))
    return times.generate(lengths, load.prompt, load.group, slots).repeated(1 / steps)


def generating(resolved: Resolved[Any], option: str, remedy: str = "leave it out") -> RunConfig:
    """Return the config of a recipe that generates what it trains on; UserError for another one, where the `option` of
    the command line has no meaning."""
    if not isinstance(resolved.config, RunConfig) or resolved.config.rollouts is not None:
        raise UserError(f"{option}: is for recipes that generate what they train on", remedy=remedy)
    return resolved.config


def planned_config(config: Any, devices: Devices) -> tuple[Any, list[str]]:
    """The config with the dtypes that `auto` becomes on these devices, and lines that say why where they were measured;
    those of the table multiply bfloat16 fastest."""
    if devices.kind.source == MEASURED:
        outcomes = list(dtype_outcomes(config))
        return settled(config, None, outcomes)[0], outcome_lines(outcomes)
    return decided_on_gpus(config), []


def attention_path(spec: ModelConfig, kind: DeviceKind, load: Load) -> str:
    """Return the path of attention in the trainer, as `PackedModel` chooses it: one of the rates of a device. Flash
    attention 3 is counted where the recipe asks for it: whether the machine has it installed is not known here.

    Raises:
        FieldError: it asks for it on other devices than Hopper GPUs.
    """
    if spec.attention == "flash3":
        bound = f"is for Hopper GPUs, and this is a plan for {kind.name}"
        remedy = "set model.attention=auto"
        require(kind.name.startswith(HOPPER), "model.attention", spec.attention, bound, remedy=remedy)
        return "flash3"
    if kind.name == CPU:
        return "sdpa"
    halves = spec.compute_dtype in ("bfloat16", "float16")
    if halves and spec.attention in ("auto", "varlen") and not kind.name.startswith("MI"):
        return "flash2"
    if load.shared and spec.attention != "padded":  # a shared prompt needs a mask
        return "masked"
    return "sdpa"


def devices_here(config: Any) -> Devices:
    """Measure this machine for the ranks of a config's placement."""
    device = str(resolve_device(config.model.device))
    config, _ = settled(config, None, list(dtype_outcomes(config)))
    return this_machine(config.model.compute_dtype, device, placed_ranks(config.placement))


def memory_of_run(resolved: Resolved[Any], device: torch.device) -> int:
    """Return the bytes of tensors that a rank has on this GPU at most when it trains, in the recipe's own layout. The
    run shows them beside what it measures.

    Raises:
        UserError, FieldError: see `plan_recipe`.
    """
    total = torch.cuda.get_device_properties(device).total_memory / GIB
    kind = nearest_kind(torch.cuda.get_device_name(device), total) or replace(device_kinds()[USUAL], name="a GPU")
    placement = resolved.config.placement
    count = MOST if PLACEMENTS.holds(placement, "ray") else placed_ranks(placement)
    plan = plan_recipe(resolved, Devices(replace(kind, memory=total), count))
    return sum(plan.memory.trainer.values())


def plan_recipe(resolved: Resolved[Any], devices: Devices, *, mean: float | None = None) -> StepPlan:
    """Plan a recipe on these devices, in its own layout. `mean`: tokens per completion; None: a share of the maximum.

    Raises:
        UserError: the size of its model is unknown.
        FieldError: the layout does not fit these devices, or does not divide the model.
    """
    recipe = PlannedRecipe.of(resolved, devices, mean)
    layout = planned_layout(resolved.config, devices)
    recipe.check(layout)
    return recipe.plan(layout)
