"""A whole step on a layout: its stages, its memory, and its bottleneck."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from proxima.config.estimate import Estimates
from proxima.config.model_size import ModelFacts
from proxima.config.resolved import Resolved
from proxima.config.schema import RunConfig
from proxima.config.sections.model_section import ModelConfig
from proxima.config.step_size import StepSize
from proxima.config.training_memory import BYTES, Share
from proxima.data import UserError
from proxima.lab.plan.device_memory import DeviceMemory, device_memory, largest_micro_batch
from proxima.lab.plan.devices import Devices
from proxima.lab.plan.layout import DeviceLayout, check_model, known_config, planned_layout
from proxima.lab.plan.rates import Rates, fitted_rates
from proxima.lab.plan.stage_times import FIXED, Stage, StageTimes
from proxima.lab.plan.step_load import StepLoad, load_of
from proxima.model.pretrained import load_config

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
Generate = Callable[[StageTimes, StepLoad, int], Stage]


@dataclass(frozen=True)
class StepPlan:
    """The time and memory of a step.

    Args:
        stages: those of the engines and of the trainer, in order.
        memory: of a device.
    """

    devices: Devices
    layout: DeviceLayout
    load: StepLoad
    model: ModelFacts
    spec: ModelConfig
    times: StageTimes
    stages: tuple[Stage, ...]
    memory: DeviceMemory

    @property
    def seconds(self) -> float:
        """Seconds of a step: the sum of the stages or, if they overlap, the slower of the two sides."""
        return max(self.sides) if self.overlaps else sum(self.sides)

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
        kind = self.devices.kind
        tokens = largest_micro_batch(self.spec, self.model, self.layout, self.load, kind)
        load = replace(self.load, micro_tokens=tokens)
        return tokens if device_memory(self.spec, self.model, self.layout, load, kind).fits else 0

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
        return {
            "devices": str(self.devices),
            "layout": asdict(self.layout),
            "load": asdict(self.load),
            "seconds": self.seconds if self.memory.fits else None,
            "tokens_per_second_per_device": self.speed if self.memory.fits else None,
            "binds": self.binds,
            "stages": [
                {"name": s.name, "seconds": s.seconds, "binds": s.binds, "parts": s.parts, "sent_bytes": s.sent}
                for s in self.stages
            ],
            "memory": asdict(self.memory) | {"fits": self.memory.fits},
            "largest_micro_batch": self.micro_batch,
            "rates": asdict(self.times.rates),
        }


def plan_step(
    model: ModelFacts,
    spec: ModelConfig,
    layout: DeviceLayout,
    load: StepLoad,
    devices: Devices,
    *,
    rates: Rates | None = None,
    memory: DeviceMemory | None = None,
    generate: Generate | None = None,
) -> StepPlan:
    """Plan a step.

    Args:
        spec: dtypes, checkpointing and adapter.
        rates: None: those of `devices.toml`.
        memory: of a device, if it is already known.
        generate: `generation`, or a cached version of it.
    """
    rates = rates or fitted_rates()
    times = stage_times(model, spec, layout, load, devices, rates)
    memory = memory or device_memory(spec, model, layout, load, devices.kind)
    stages = [(generate or generation)(times.engine_alone(), load, max(1, memory.slots))]
    tokens, square = load.trained * (load.mean + load.prompt_tokens), load.mean_square
    if load.forwards:
        forward = times.forward(tokens, load.prompt + load.largest(load.trained), mean_square=square)
        stages.append(_times(forward, load.forwards))
    part = load.trained * load.passes // load.updates
    longest = load.prompt + load.largest(part)
    update = times.update(tokens * load.passes / load.updates, longest, mean_square=square)
    stages += [_times(update, load.updates), times.publish(), Stage("else", {FIXED: rates.step})]
    return StepPlan(devices, layout, load, model, spec, times, tuple(stages), memory)


def generation(times: StageTimes, load: StepLoad, slots: int) -> Stage:
    """Return the generation stage of engines with equal parts. A completion that begins when a step ends is trained on
    `lag` steps later, and that step waits for it: the completions of `lag` steps are generated in the time of these."""
    layout = times.layout
    steps = load.lag if load.lag and not layout.colocated else 1
    lengths = load.lengths(max(1, round(steps * load.sequences / layout.engines)))
    return _times(times.generate(lengths, load.prompt, load.group, slots), 1 / steps)


def stage_times(
    model: ModelFacts, spec: ModelConfig, layout: DeviceLayout, load: StepLoad, devices: Devices, rates: Rates
) -> StageTimes:
    """Return the durations of a model's stages on a layout."""
    master = BYTES[spec.dtype]
    adapter = None if spec.lora is None else model.adapter or 0
    gathered = 2 if layout.sharding.param_dtype == "bfloat16" else master
    return StageTimes(
        model,
        layout,
        devices.kind,
        rates,
        master,
        gathered,
        checkpointing=load.checkpointing,
        micro_tokens=load.micro_tokens,
        adapter=adapter,
        eager=load.eager,
    )


def _times(stage: Stage, count: float) -> Stage:
    parts = {name: seconds * count for name, seconds in stage.parts.items()}
    return stage._replace(parts=parts, sent={name: size * count for name, size in stage.sent.items()})


@dataclass(frozen=True)
class PlannedRecipe:
    """The common part of a recipe's plans on several layouts. `config`: the model's `transformers` config, or a similar
    one."""

    model: ModelFacts
    spec: ModelConfig
    load: StepLoad
    devices: Devices
    config: Any

    @classmethod
    def of(cls, resolved: Resolved[Any], devices: Devices, mean: float | None = None) -> "PlannedRecipe":
        """Read a recipe whose completions have `mean` tokens.

        Raises:
            UserError: it does not generate, its completions can't have that mean, or its model's size is unknown.
        """
        config = resolved.config
        if not isinstance(config, RunConfig):
            raise UserError("--devices plans runs that generate; `proxima rehearse` counts the memory of others")
        most = config.sampling.max_tokens
        if mean is not None and not 1 <= mean <= most:
            raise UserError(f"--mean-length {mean:g} must be in [1, sampling.max_tokens={most}]")
        estimates = Estimates(resolved, gemm=1e12, share=Share(1))
        if estimates.model is None:
            remedy = "download the model first, or name one whose size is known"
            raise UserError(f"no plan: the size of {config.model.path} is not known", remedy=remedy)
        own = known_config(estimates.model) if estimates.known_size else _checked_config(config.model)
        assert isinstance(estimates.batch, StepSize)
        load = load_of(config, estimates.batch, mean, fitted_rates().spread)
        return cls(estimates.model, config.model, load, devices, own)

    def check(self, layout: DeviceLayout) -> None:
        """Raise a FieldError for a layout that is impossible for the model."""
        check_model(layout, self.config, adapters=self.spec.lora is not None)

    def plan(self, layout: DeviceLayout, load: StepLoad | None = None, **estimates: Any) -> StepPlan:
        """Plan one layout; `estimates` are passed to `plan_step`."""
        load = load or self.load
        load = replace(load, lag=0) if layout.colocated else load
        return plan_step(self.model, self.spec, layout, load, self.devices, **estimates)


def _checked_config(spec: ModelConfig) -> Any:
    """Load the model's config. UserError if it has layers without attention: their cache and cost are different."""
    config = load_config(spec.path, spec.revision)
    text = config.get_text_config()
    other = sorted({*(getattr(text, "layer_types", None) or ())} - ATTENTION)
    if other or not getattr(text, "num_attention_heads", None):
        layers = f"with layers of {', '.join(other)}" if other else "without attention"
        remedy = "plan a decoder with attention in every layer"
        raise UserError(f"no plan for {text.model_type}, {layers}", remedy=remedy)
    return config


def plan_recipe(
    resolved: Resolved[Any],
    devices: Devices,
    *,
    layout: DeviceLayout | None = None,
    mean: float | None = None,
    counted: dict[str, int] | None = None,
) -> StepPlan:
    """Plan a recipe on these devices, in its own layout or another one.

    Args:
        mean: tokens per completion; None: a share of the maximum.
        counted: bytes of a rank by kind, from a rehearsal.

    Raises:
        UserError: the recipe does not generate, or the size of its model is unknown.
        FieldError: the layout does not fit these devices, or does not divide the model.
    """
    recipe = PlannedRecipe.of(resolved, devices, mean)
    layout = layout or planned_layout(resolved.config, devices)
    recipe.check(layout)
    memory = device_memory(recipe.spec, recipe.model, layout, recipe.load, devices.kind, counted)
    return recipe.plan(layout, memory=memory)
