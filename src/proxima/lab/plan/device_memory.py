"""The memory of one device under a layout: that of the trainer by the formula of `explain`, and that of an engine."""

import math
from dataclasses import dataclass, replace
from typing import Any

from proxima.config.model_size import ModelFacts
from proxima.config.sections.model_section import ModelConfig
from proxima.config.training_memory import MOMENTS, MOMENTUM, Forwarded, Share, training_memory
from proxima.lab.plan.devices import GIB, DeviceKind
from proxima.lab.plan.layout import DeviceLayout, key_parts
from proxima.lab.plan.step_load import StepLoad

CONTEXT = GIB  # of CUDA and its kernels
FRAGMENTED = 0.05  # of the allocated bytes: blocks that the allocator can't reuse
# memory that a trainer holds while engines generate, by the names of the formula and of a rehearsal
STEADY = ("weights", "adapter", "gradients", MOMENTS, MOMENTUM, "reference model", "optimizer")
ENGINE_WEIGHTS, CACHE = "engine's weights", "KV cache"
ROOM, MOST_RUNNING = 0.9, 1024  # of a device that an engine fills; completions that a server runs at once


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device, in bytes.

    Args:
        trainer: bytes of a rank, by kind. engine: bytes of an engine's device, by kind.
        slots: completions that an engine runs at once; 0: its weights leave no room.
        needed: bytes of the device that needs the most.
        memory: capacity of a device.
        source: `formula` or `rehearsal`, the source of the trainer's bytes.
    """

    trainer: dict[str, int]
    engine: dict[str, int]
    slots: int
    needed: int
    memory: int
    source: str = "formula"

    @property
    def fits(self) -> bool:
        return self.needed <= self.memory and self.slots > 0


def trainer_memory(
    spec: ModelConfig, model: ModelFacts, layout: DeviceLayout, load: StepLoad, budget: int = 0
) -> dict[str, int]:
    """Return the bytes of a rank by kind, with micro-batches of `budget` tokens, or of the step's size if 0."""
    update = load.trained * (load.mean + load.prompt_tokens) * load.passes / load.updates / max(1, layout.shares)
    tokens = max(min(budget or load.micro_tokens, math.ceil(update)), load.prompt + load.longest)
    own = math.ceil(tokens / layout.sharding.context_parallel)
    if layout.pipeline > 1:  # the model of one pipeline stage
        layers = math.ceil(model.layers / layout.pipeline)
        model = replace(model, layers=layers, parameters=model.parameters * layers // model.layers)
    ranks = layout.ranks // layout.pipeline
    share = Share(ranks, layout.sharding if layout.ranks > 1 else None)
    forwarded = Forwarded(own, own, 0, alone=update <= tokens, fused=load.fused)
    kinds = training_memory(spec, model, forwarded, share, load.optimizer)
    kinds = {kind: size for kind, size in kinds.items() if size}
    return kinds | ({"reference model": load.references * kinds["weights"]} if load.references else {})


def device_memory(
    spec: ModelConfig,
    model: ModelFacts,
    layout: DeviceLayout,
    load: StepLoad,
    device: DeviceKind,
    trainer: dict[str, int] | None = None,
) -> DeviceMemory:
    """Return the memory of a layout. `trainer`: bytes counted by a rehearsal, which replace the formula."""
    rank = trainer or trainer_memory(spec, model, layout, load)
    held = sum(rank.get(kind, 0) for kind in STEADY) if layout.colocated else 0
    size, total = layout.engine_devices, int(device.memory * GIB)
    weights = 2 * model.parameters // size
    row = 2 * 2 * model.layers * model.kv_width * (load.prompt + load.longest) // key_parts(model, size)
    mean = row * (load.prompt + load.mean) / (load.prompt + load.longest)  # a paged cache only holds existing tokens
    left = ROOM * total - weights - held - CONTEXT
    engine = load.asked / layout.engines
    slots = int(min(left / mean, load.slots or MOST_RUNNING, math.ceil(engine))) if left >= row else 0
    generating = {ENGINE_WEIGHTS: weights, CACHE: round(max(slots, 1) * mean)}
    training = CONTEXT + math.ceil(sum(rank.values()) * (1 + FRAGMENTED))
    if layout.in_process:
        training += weights
    needed = max(training, CONTEXT + held + sum(generating.values()))
    return DeviceMemory(rank, generating, slots, needed, total, "formula" if trainer is None else "rehearsal")


def largest_micro_batch(spec: Any, model: ModelFacts, layout: DeviceLayout, load: StepLoad, device: DeviceKind) -> int:
    """Return the tokens of the largest micro-batch that fits a rank, in steps of 1,024; 0 if the longest sequence does
    not fit."""

    def fits(tokens: int) -> bool:
        many = replace(load, sequences=10**9, kept=None)  # no update is too short to fill it
        used = sum(trainer_memory(spec, model, layout, many, tokens).values())
        beside = 2 * model.parameters // layout.engine_devices if layout.in_process else 0
        return CONTEXT + beside + used * (1 + FRAGMENTED) <= device.memory * GIB

    longest = load.prompt + load.longest
    if not fits(longest):
        return 0
    low, high = longest, longest + 1024
    while fits(high) and high < 2**22:
        low, high = high, 2 * high
    while high - low > 1024:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low // 1024 * 1024 if low >= 1024 else low
