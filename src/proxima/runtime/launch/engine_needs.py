"""The requirements of a run on its engines, and the check that they are met, before any weights are loaded."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from proxima.config.sections.sampling_section import replays_sampling_masks
from proxima.core.advantage import needs_baseline
from proxima.data import within
from proxima.engine.protocol import Engine, EngineRequirements, EngineSetup, LogProbName, Sampling, close_engine
from proxima.model.pretrained import UnloadedModel
from proxima.rollout.generator import greedy
from proxima.runtime.placement.placed_engine import placed_engine, starts_later

if TYPE_CHECKING:
    from proxima.config.schema import EvaluateConfig, RunConfig
    from proxima.config.sections.eval_section import EvalSetConfig

REFERENCE = "algorithm.reference_engine"
TEACHER = "algorithm.distillation.engine"


def check_engines(config: "RunConfig", model: UnloadedModel) -> list[str]:
    """Check that the engines of the rollouts, the reference and the teacher meet the requirements of the run; `model`
    is the policy.

    Returns: warnings.

    Raises:
        FieldError, UserError: as `EngineSpec.check`; a field is named by its path in the config.
    """
    notes: list[str] = []
    for path, spec, needs in _engines(config, model):
        notes += ask_engine(spec, needs, path)
    return notes


def ask_engine(spec: Any, needs: EngineRequirements, path: str = "engine") -> list[str]:
    """Run `EngineSpec.check` for a spec at `path`. A spec that does not derive from `EngineSpec` has no check."""
    check = getattr(spec, "check", None)
    if check is None:
        return []
    with within(path):
        return [f"{path}: {note}" for note in check(needs)]


def build_engine(
    spec: Any, setup: EngineSetup, needs: EngineRequirements, path: str = "engine"
) -> tuple[Engine, list[str]]:
    """Build the engine. Also returns the warnings about a server that it started, which could not be checked before.

    Raises:
        FieldError, UserError: as `ask_engine`; the server is stopped.
    """
    if getattr(spec, "serve", None) is None:
        return spec.build(setup), []
    with within(path):
        engine: Engine = spec.build(setup)
    try:
        return engine, ask_engine(engine, needs, path)
    except BaseException:
        close_engine(engine)
        raise


def scoring_engine(config: "RunConfig", path: str, model: UnloadedModel) -> tuple[Any, EngineRequirements]:
    """The engine spec of the reference or the teacher, at `path`, and its requirements."""
    return next((spec, needs) for at, spec, needs in _engines(config, model) if at == path)


def _engines(config: "RunConfig", model: UnloadedModel) -> Iterator[tuple[str, Any, EngineRequirements]]:
    algorithm = config.algorithm
    rollouts = rollout_needs(config, model)
    if rollouts.samplings and not starts_later(config.placement):
        yield "engine", placed_engine(config.engine), rollouts
    temperature = (config.sampling.temperature,)
    if algorithm.reference_engine is not None and algorithm.needs_reference:
        yield REFERENCE, algorithm.reference_engine, _scoring(rollouts, "reference", temperature)
    if algorithm.distillation is not None and algorithm.distillation.engine is not None:
        teacher = UnloadedModel.read(algorithm.distillation.path, max_length=model.context)
        needs = replace(_scoring(rollouts, "teacher", temperature), **_of_model(teacher, config))
        yield TEACHER, algorithm.distillation.engine, needs


def rollout_needs(config: "RunConfig", model: UnloadedModel) -> EngineRequirements:
    """Requirements on the engine that generates; `samplings` is empty for a replay without held-out questions."""
    algorithm, replayed = config.algorithm, config.replayed is not None
    behavior: frozenset[LogProbName] = frozenset({algorithm.behavior})
    held_out = [evaluation_sampling(config.sampling, spec) for spec in config.eval.all_sets.values()]
    baseline = [greedy(config.sampling)] if needs_baseline(algorithm.advantage) and not replayed else []
    training = [] if replayed else [config.sampling]
    caches_next = algorithm.proximal == "next" and not replayed
    return EngineRequirements(
        **_of_model(model, config),
        training=None if replayed else config.sampling,
        samplings=tuple(dict.fromkeys([*training, *baseline, *held_out])),
        log_probs=behavior if algorithm.reads_behavior else frozenset(),
        measured=behavior if algorithm.mismatch.measure else frozenset(),
        publishes=True,
        overlaps=config.runtime.overlaps,
        sleeps=bool(getattr(config.placement, "colocate", False) and config.placement.gpus_per_rank),
        in_flight=caches_next,
        score_temperatures=(config.sampling.temperature,) if caches_next and algorithm.next_from == "engine" else (),
        sampling_mask=replays_sampling_masks(config.sampling, config.algorithm) and not replayed,
        corrected=bool(algorithm.correction),
    )


def evaluation_needs(
    config: "EvaluateConfig", model: UnloadedModel, samplings: Sequence[Sampling]
) -> EngineRequirements:
    """Requirements on an engine that only answers questions: no log-probs are read."""
    return EngineRequirements(**_of_model(model, config), samplings=tuple(dict.fromkeys(samplings)), publishes=True)


def evaluation_sampling(training: Sampling, spec: "EvalSetConfig") -> Sampling:
    """The sampling of a set: its own if given; otherwise that of training for several samples, or greedy with
    training's `max_tokens` and `stop` for one."""
    alone = Sampling(temperature=0.0, max_tokens=training.max_tokens, stop=training.stop)
    return spec.sampling or (training if spec.samples > 1 else alone)


def _of_model(model: UnloadedModel, config: "RunConfig | EvaluateConfig") -> dict[str, Any]:
    return {
        "model_path": model.path,
        "revision": model.revision,
        "tokenizer": model.tokenizer,
        "vocabulary": model.vocabulary,
        "max_length": model.context,
        "compute_dtype": config.model.compute_dtype,
    }


def _scoring(rollouts: EngineRequirements, role: str, temperatures: tuple[float, ...]) -> EngineRequirements:
    """Requirements on an engine that scores with a model whose weights never change."""
    idle: dict[str, Any] = {"training": None, "samplings": (), "publishes": False, "overlaps": False, "sleeps": False}
    idle |= {"in_flight": False, "log_probs": frozenset(), "measured": frozenset()}
    return replace(rollouts, role=role, score_temperatures=temperatures, **idle)
