"""The bytes that a run holds at once, by kind."""

import math
from dataclasses import replace
from typing import Any

from proxima.config.model_size import ModelFacts, model_facts
from proxima.config.schema import RunConfig
from proxima.config.sections.episode_section import tasks_of
from proxima.config.sections.offline_section import OfflineConfig, SampledEvalConfig
from proxima.config.step_size import ExampleStep, StepSize
from proxima.config.training_memory import (
    ACTIVATIONS,
    BYTES,
    LOGITS,
    MOMENTS,
    MOMENTUM,
    Forwarded,
    Share,
    offloaded_memory,
    rank_share,
    training_memory,
)
from proxima.engine import ENGINES
from proxima.engine.cache import ROUND
from proxima.reward import REWARDS
from proxima.task.protocol import is_played

ENGINE_COPY = "engine's copy of the weights"
ENGINE = (
    ENGINE_COPY,
    "KV cache",
    "kept KV of earlier turns",
    "weights shared with the engine's process",
    "reward models",
)
"""Entries that only rank 0 holds, in addition to the trained models."""
HANDED = ("new weights, for the servers to read", "perturbed copy of them, for servers that return")
"""Entries that rank 0 holds in host memory, whatever its device."""

AnyConfig = RunConfig | OfflineConfig


def memory_of(
    config: AnyConfig,
    model: ModelFacts,
    batch: StepSize | ExampleStep,
    teacher: ModelFacts | None = None,
    critic: ModelFacts | None = None,
    share: Share | None = None,
) -> dict[str, int]:
    """The bytes of a run on the first rank's device, by purpose; the sum counts both engine and trainer, although they
    take turns. `share` defaults to that of the config's placement."""
    share = share or rank_share(config.placement)
    forwarded = forwarded_of(config, batch, share)
    parts = training_memory(config.model, model, forwarded, share, config.train.optimizer)
    if isinstance(batch, StepSize) and isinstance(config, RunConfig):
        activations, logits = parts.pop(ACTIVATIONS), parts.pop(LOGITS)
        if critic is not None:
            optimizer = getattr(config.critic, "optimizer", None) or config.train.optimizer
            whole, late = replace(config.model, lora=None), replace(forwarded, alone=False)
            own = training_memory(whole, critic, late, share, optimizer)
            activations = max(activations, own[ACTIVATIONS])  # they take turns
            parts["critic's weights"] = own["weights"] + own["autocast copy of the weights"]
            parts["critic's gradients and Adam's moments"] = own["gradients"] + own[MOMENTS] + own[MOMENTUM]
        parts |= _frozen_memory(config, model, teacher, share) | _engine_memory(config, model, batch)
        parts |= {ACTIVATIONS: activations, LOGITS: logits + _slots(config, batch) * model.vocabulary * 4}
    elif config.eval.task is not None and isinstance(config.eval, SampledEvalConfig) and config.eval.samples:
        parts[ENGINE_COPY] = model.parameters * BYTES["bfloat16"]
    return {name: size for name, size in parts.items() if size}


def host_memory(config: AnyConfig, model: ModelFacts, share: Share) -> dict[str, int]:
    """The bytes of host memory that ranks on several devices use, by purpose."""
    copied = isinstance(config, RunConfig) and share.ranks > 1
    parts = {
        "offloaded by each rank": offloaded_memory(config.model, model, share, config.train.optimizer),
        "plain copy of the weights on rank 0": model.parameters * BYTES[config.model.dtype] if copied else 0,
    }
    return {name: size for name, size in parts.items() if size}


def forwarded_of(config: AnyConfig, batch: StepSize | ExampleStep, share: Share) -> Forwarded:
    """The largest micro-batch of a rank."""
    if not (isinstance(batch, StepSize) and isinstance(config, RunConfig)):
        tokens = max(min(batch.budget, math.ceil(batch.tokens / share.shares)), batch.longest)
        own = batch.longest - batch.longest // 2  # half of an example is assumed to be its prompt
        masked = tokens // max(1, batch.longest) * own * batch.longest
        part = math.ceil(tokens / share.context)
        return Forwarded(part, part + part // 2, masked, batch.tokens / share.shares <= batch.budget)
    updates = config.train.updates_per_step
    update = math.ceil(batch.tokens / updates / share.shares)
    tokens = max(min(batch.budget, update), batch.longest)
    length, size = config.sampling.max_tokens, batch.kept or batch.completions
    prompt = batch.longest - length
    of_group = prompt + size * length if config.model.share_prompt else size * batch.longest
    rows = max(1, round(tokens * size / of_group))
    keys = rows * batch.longest + (rows * prompt // size if config.model.share_prompt else rows * prompt)
    part, keys = math.ceil(tokens / share.context), math.ceil(keys / share.context)
    return Forwarded(part, keys, rows * length * batch.longest, update <= batch.budget)


def _frozen_memory(config: RunConfig, model: ModelFacts, teacher: ModelFacts | None, share: Share) -> dict[str, int]:
    """The bytes of the models that only score."""
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
        "reference model": _scorer_bytes(config, model.parameters, engine, share) if frozen else 0,
        "teacher model": _scorer_bytes(config, teacher.parameters, algorithm.distillation.engine, share)
        if teacher is not None and algorithm.distillation is not None
        else 0,
    }


def _engine_memory(config: RunConfig, model: ModelFacts, batch: StepSize) -> dict[str, int]:
    """The bytes of the engine that generates, and of the weights handed to it."""
    engine, element = config.engine, _weight_bytes(config, config.engine)
    master = model.parameters * BYTES[config.model.dtype]
    handed = 0 if _here(engine) or getattr(engine, "weight_folder", None) else master
    local, played = ENGINES.holds(engine, "local", "local_process"), any(map(is_played, tasks_of(config).values()))
    cache = 2 * model.layers * model.kv_width * _row(config, batch, played) * _slots(config, batch) * element
    return {
        ENGINE_COPY: model.parameters * element if engine.needs_weights else 0,
        **dict.fromkeys(HANDED, handed),
        "weights shared with the engine's process": master if ENGINES.holds(engine, "local_process") else 0,
        "KV cache": cache,
        "kept KV of earlier turns": cache if local and played else 0,  # `Scheduler` keeps as much KV as all rows have
    }


def _row(config: RunConfig, batch: StepSize, played: bool) -> int:
    """The tokens that a row of the cache has room for: a prompt and its completion, or an episode. An environment's
    answers are included only if a limit of the recipe covers them."""
    longest = batch.longest
    if played:
        prompt, own = batch.longest - config.sampling.max_tokens, config.episode.tokens
        bounds = [config.model.max_length, None if own is None else prompt + own]
        turns = prompt + config.episode.turns * config.sampling.max_tokens
        longest = min((bound for bound in bounds if bound is not None), default=turns)
    return math.ceil(longest / ROUND) * ROUND


def _slots(config: RunConfig, batch: StepSize) -> int:
    """The number of completions generated at once on this machine; 0 for a server, whose memory is not counted."""
    engine, rows = config.engine, batch.generated[1]
    most = getattr(engine, "slots", None) or getattr(engine, "max_rows", None) or rows
    return min(rows, most) if _here(engine) else 0


def _here(engine: Any) -> bool:
    """True for an engine whose weights count as memory of this run; a server has `urls`."""
    return not hasattr(engine, "urls")


def _weight_bytes(config: RunConfig, engine: Any) -> int:
    """The bytes of each weight of an engine, and of each element of its keys and values."""
    return BYTES.get(str(getattr(engine, "dtype", None)), BYTES[config.model.compute_dtype])


def _scorer_bytes(config: RunConfig, parameters: int, engine: Any, share: Share) -> int:
    """The bytes of a frozen model's weights, and of the copy in an engine that runs it; 0 if a server holds them."""
    if engine is not None and not engine.needs_weights:
        return 0
    if engine is None:
        return 0 if share.offloads else parameters * BYTES[config.model.dtype] // share.parts
    return parameters * (BYTES[config.model.dtype] + _weight_bytes(config, engine))
