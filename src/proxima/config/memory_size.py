"""How many bytes a run holds at once, by what they are."""

import math
from dataclasses import replace
from typing import Any

from proxima.config.model_size import ModelFacts, model_facts
from proxima.config.schema import RunConfig
from proxima.config.sections.model_section import ModelConfig
from proxima.config.sections.offline_section import OfflineConfig, SampledEvalConfig
from proxima.config.step_size import ExampleStep, StepSize
from proxima.engine import ENGINES
from proxima.reward import REWARDS

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ACTIVATIONS = "activations of a micro-batch"
ENGINE_COPY = "engine's copy of the weights"

AnyConfig = RunConfig | OfflineConfig


def memory_of(
    config: AnyConfig,
    model: ModelFacts,
    batch: StepSize | ExampleStep,
    teacher: ModelFacts | None = None,
    critic: ModelFacts | None = None,
) -> dict[str, int]:
    """Bytes of a run on one device, by what they hold; the sum counts engine and trainer, which take turns, at once."""
    forwarded = max(min(batch.budget, batch.tokens), batch.longest)
    parts = training_memory(config.model, model, forwarded)
    if isinstance(batch, StepSize) and isinstance(config, RunConfig):
        activations, logits = parts.pop(ACTIVATIONS), parts.pop("logits")
        if critic is not None:
            own = training_memory(replace(config.model, lora=None), critic, forwarded)
            activations = max(activations, own[ACTIVATIONS])  # they take turns
            parts["critic's weights"] = own["weights"] + own["autocast copy of the weights"]
            parts["critic's gradients and Adam's moments"] = own["gradients"] + own["Adam's two moments"]
        parts |= _frozen_memory(config, model, teacher) | _engine_memory(config, model, batch)
        parts |= {ACTIVATIONS: activations, "logits": logits + _slots(config, batch) * model.vocabulary * 4}
    elif config.eval.task is not None and isinstance(config.eval, SampledEvalConfig) and config.eval.samples:
        parts[ENGINE_COPY] = model.parameters * BYTES["bfloat16"]
    return {name: size for name, size in parts.items() if size}


def _frozen_memory(config: RunConfig, model: ModelFacts, teacher: ModelFacts | None) -> dict[str, int]:
    """Bytes of the models that only score."""
    algorithm, engine = config.algorithm, config.algorithm.reference_engine
    rewards = {*config.reward, *(spec for held_out in config.eval.sets for spec in held_out.reward)}
    adapter_off = engine is None and config.model.lora is not None  # the policy without it is the reference
    frozen = algorithm.needs_reference and not adapter_off
    return {
        "reward models": sum(
            model_facts(reward.path, reward.revision).parameters * BYTES[reward.dtype]
            for reward in rewards
            if REWARDS.holds(reward, "model")
        ),
        "reference model": _scorer_bytes(config, model.parameters, engine) if frozen else 0,
        "teacher model": _scorer_bytes(config, teacher.parameters, algorithm.distillation.engine)
        if teacher is not None and algorithm.distillation is not None
        else 0,
    }


def _engine_memory(config: RunConfig, model: ModelFacts, batch: StepSize) -> dict[str, int]:
    """Bytes of the engine that generates, and of what is handed to it."""
    engine, element = config.engine, _weight_bytes(config, config.engine)
    master = model.parameters * BYTES[config.model.dtype]
    handed = 0 if _here(engine) or getattr(engine, "weight_folder", None) else master
    row = math.ceil(batch.longest / 64) * 64
    return {
        ENGINE_COPY: model.parameters * element if engine.needs_weights else 0,
        "new weights, for the servers to read": handed,
        "perturbed copy of them, for servers that return": handed,
        "weights shared with the engine's process": master if ENGINES.holds(engine, "local_process") else 0,
        "KV cache": 2 * model.layers * model.kv_width * row * _slots(config, batch) * element,
    }


def _slots(config: RunConfig, batch: StepSize) -> int:
    """Completions that are generated at once here; a server's memory is its own."""
    engine, rows = config.engine, batch.generated[1]
    most = getattr(engine, "slots", None) or getattr(engine, "max_rows", None) or rows
    return min(rows, most) if _here(engine) else 0


def _here(engine: Any) -> bool:
    """True for an engine that holds its weights on this machine's account; a server has `urls`."""
    return not hasattr(engine, "urls")


def _weight_bytes(config: RunConfig, engine: Any) -> int:
    """Of each weight of an engine, and each element of its keys and values."""
    return BYTES.get(str(getattr(engine, "dtype", None)), BYTES[config.model.compute_dtype])


def _scorer_bytes(config: RunConfig, parameters: int, engine: Any) -> int:
    """Weights of a frozen model, and the copy of an engine that runs it; those of a server are its own."""
    if engine is not None and not engine.needs_weights:
        return 0
    copied = 0 if engine is None else _weight_bytes(config, engine)
    return parameters * (BYTES[config.model.dtype] + copied)


def training_memory(spec: ModelConfig, model: ModelFacts, forwarded: int) -> dict[str, int]:
    """Bytes of the trainer alone, by what they hold, with `forwarded` tokens in a micro-batch; an entry may be 0."""
    p, compute, master = model.parameters, BYTES[spec.compute_dtype], BYTES[spec.dtype]
    per_layer = model.hidden if spec.gradient_checkpointing else 10 * model.hidden + 4 * model.intermediate
    adapter = model.adapter or 0
    trained, gradients = (p, p * master) if spec.lora is None else (adapter, adapter * 4)
    return {
        "weights": p * master,
        "adapter": adapter * 4,
        "gradients": gradients,
        "Adam's two moments": 2 * trained * 4,
        "autocast copy of the weights": p * compute if compute != master else 0,
        ACTIVATIONS: forwarded * model.layers * per_layer * compute,
        "logits": 3 * min(spec.log_prob_chunk, forwarded) * model.vocabulary * 4,
    }
