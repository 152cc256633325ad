"""Builds the forward passes before the update that loss and reward need: of recomputed, frozen and other policies."""

from collections.abc import Mapping
from pathlib import Path

from proxima.config.schema import RunConfig
from proxima.engine.choice import EngineChoice
from proxima.model.compute_thread import ComputeThread
from proxima.model.model_source import ModelSource
from proxima.model.policy import Policy
from proxima.runtime.launch.engine_needs import REFERENCE, TEACHER
from proxima.runtime.launch.teacher import make_engine_stage, make_teacher_stage
from proxima.training.forward_stage import ForwardStage, LogProbStage, ScoreVarianceStage


def make_stages(
    config: RunConfig,
    source: ModelSource,
    policy: Policy,
    compute: ComputeThread,
    engines: Mapping[str, EngineChoice],
    log: Path | None,
    *,
    leads: bool,
) -> list[ForwardStage]:
    """Build the forward stages that loss and reward need before the update. `engines` run some of them, and write to
    `log`; only the rank that `leads` queries these engines."""
    stages: list[ForwardStage] = []
    if config.recomputes_proximal:
        records = config.algorithm.routing_replay == "recompute"
        stages.append(LogProbStage("proximal_log_prob", policy, records_routes=records))
    if "score_variance" in config.algorithm.advantage.needs:
        stages.append(ScoreVarianceStage(policy))
    algorithm, distillation = config.algorithm, config.algorithm.distillation
    if algorithm.needs_reference and algorithm.reference_engine is not None:
        stages += [make_engine_stage(source, engines[REFERENCE], compute, log)] if leads else []
    elif algorithm.needs_reference and source.lora is not None:
        stages.append(LogProbStage("reference_log_prob", policy, adapter=False))
    elif algorithm.needs_reference:
        frozen = compute.call(source.load)
        frozen.model.requires_grad_(False)
        stages.append(LogProbStage("reference_log_prob", source.policy(frozen)))
    if distillation is not None and distillation.engine is not None:
        stages += [make_engine_stage(source, engines[TEACHER], compute, log)] if leads else []
    elif distillation is not None:
        stages.append(make_teacher_stage(source, distillation, policy.loaded, compute))
    return stages
