"""The engines of a run, and what each must meet, before any weights are loaded."""

from proxima.config.schema import RunConfig
from proxima.config.sections.sampling_section import replays_sampling_masks
from proxima.core.advantage.protocol import needs_baseline
from proxima.engine.choice import EngineChoice
from proxima.engine.protocol import EngineRequirements, LogProbName
from proxima.model.pretrained import UnloadedModel
from proxima.rollout.generator import greedy
from proxima.runtime.placement.launcher import placed_engine

REFERENCE = "algorithm.reference_engine"
TEACHER = "algorithm.distillation.engine"


def engine_choices(config: RunConfig, model: UnloadedModel, teacher: UnloadedModel | None) -> dict[str, EngineChoice]:
    """The engines of the rollouts, the reference and the teacher, as far as the run has them, each with what it must
    meet, by their paths in the config; `model` is the policy. Nothing is asked yet."""
    algorithm, temperature = config.algorithm, config.sampling.temperature
    rollouts, choices = rollout_needs(config, model), list[EngineChoice]()
    if rollouts.samplings:
        choices.append(EngineChoice(spec=placed_engine(config.engine), needs=rollouts))
    if (reference := algorithm.reference_engine) is not None and algorithm.needs_reference:
        needs = _scoring(rollouts, "reference", model, temperature)
        choices.append(EngineChoice(spec=reference, needs=needs, path=REFERENCE))
    if (distillation := algorithm.distillation) is not None and distillation.engine is not None:
        assert teacher is not None
        needs = _scoring(rollouts, "teacher", teacher, temperature)
        choices.append(EngineChoice(spec=distillation.engine, needs=needs, path=TEACHER))
    return {choice.path: choice for choice in choices}


def rollout_needs(config: RunConfig, model: UnloadedModel) -> EngineRequirements:
    """Requirements on the engine that generates; `samplings` is empty for a replay without held-out questions."""
    algorithm, replayed = config.algorithm, config.replayed is not None
    behavior: frozenset[LogProbName] = frozenset({algorithm.behavior})
    held_out = [spec.groups(config.seed).sampling for spec in config.eval.all_sets.values()]
    baseline = [greedy(config.sampling)] if needs_baseline(algorithm.advantage) and not replayed else []
    training = [] if replayed else [config.sampling]
    caches_next = algorithm.proximal == "next" and not replayed
    return EngineRequirements(
        model=model,
        compute_dtype=config.model.compute_dtype,
        training=None if replayed else config.sampling,
        samplings=tuple(dict.fromkeys([*training, *baseline, *held_out])),
        log_probs=behavior if algorithm.reads_behavior else frozenset(),
        measured=behavior if algorithm.mismatch.measure else frozenset(),
        publishes=True,
        overlaps=config.runtime.overlaps,
        sleeps=bool(getattr(config.placement, "colocate", False) and config.placement.gpus_per_rank),
        score_temperatures=(config.sampling.temperature,) if caches_next and algorithm.next_from == "engine" else (),
        sampling_mask=replays_sampling_masks(config.sampling, config.algorithm) and not replayed,
        corrected=bool(algorithm.correction),
    )


def _scoring(rollouts: EngineRequirements, role: str, model: UnloadedModel, temperature: float) -> EngineRequirements:
    """Requirements on an engine that scores with a model whose weights never change."""
    return EngineRequirements(
        model=model,
        role=role,
        score_temperatures=(temperature,),
        sampling_mask=rollouts.sampling_mask,
        compute_dtype=rollouts.compute_dtype,
        corrected=rollouts.corrected,
    )
