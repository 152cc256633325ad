"""The check of `algorithm.distillation`, imported only if a recipe has a teacher."""

from typing import Any

from proxima.config.resolved import Findings
from proxima.config.sections.algorithm_section import AlgorithmConfig, fields_set
from proxima.config.sections.model_section import model_problem


def teacher_is_usable(algorithm: AlgorithmConfig, engine: Any) -> Findings:
    """The teacher must exist, and the log-probs that its divergence compares must be supplied."""
    distillation = algorithm.distillation
    assert distillation is not None
    if problem := model_problem(distillation.path):
        yield "algorithm.distillation.path", problem
    top_k, path = distillation.divergence.top_k, "algorithm.distillation.divergence.top_k"
    if distillation.engine is not None and top_k:
        yield path, "must be 0 with algorithm.distillation.engine: an engine scores the sampled tokens alone"
    reported = getattr(engine, "top_k_log_probs", 0)
    if top_k > reported and distillation.divergence.top_k_of == "student":
        message = f"is more than the {reported} tokens that the engine reports; set engine.top_k_log_probs={top_k}"
        yield path, f"{message}, or top_k_of=teacher"
    if not algorithm.trains_on_rewards:
        for slot, off in fields_set(algorithm, {"reward_kl": "null", "correction": "[]"}):
            message = f"acts on rewards, which are only measured; set algorithm.{slot}={off}"
            yield f"algorithm.{slot}", f"{message}, or name an algorithm.surrogate"
