"""Checks of the parts of `algorithm` that most recipes leave out: teacher, pairs, penalties."""

from collections.abc import Iterator
from typing import Any

from proxima.config.resolved import Findings, Resolved
from proxima.config.sections.algorithm_section import AlgorithmConfig, fields_that_are_on
from proxima.config.sections.model_section import model_problem
from proxima.config.sections.train_section import TrainConfig
from proxima.core import SELECTIONS
from proxima.core.aggregate import TokenMean


def teacher_is_usable(r: Resolved[Any], algorithm: AlgorithmConfig, engine: Any) -> Findings:
    """The teacher must exist, and the log-probs that its divergence compares must be supplied."""
    distillation = algorithm.distillation
    if distillation is None:
        return
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
        for slot, off in fields_that_are_on(algorithm, {"reward_kl": "null", "correction": "[]"}):
            message = f"acts on rewards, which are only measured; set algorithm.{slot}={off}"
            yield f"algorithm.{slot}", f"{message}, or name an algorithm.surrogate"


def preference_is_the_whole_loss(algorithm: AlgorithmConfig) -> Findings:
    """A loss over pairs replaces the surrogate and the settings around it, and needs a selection that leaves pairs."""
    off = {"surrogate": "null", "correction": "[]", "reference_kl": "null", "distillation": "null"}
    off |= {"penalty": "[]", "entropy_bonus": "0", "proximal": "behavior", "router_balance": "null"}
    off |= {} if isinstance(algorithm.aggregate, TokenMean) else {"aggregate": "token_mean"}
    for slot, value in fields_that_are_on(algorithm, off):
        message = f"has no effect in online DPO; set algorithm.{slot}={value}, or algorithm.preference=null"
        yield f"algorithm.{slot}", message
    if algorithm.mismatch.on_mismatch == "reject":
        yield "algorithm.mismatch.on_mismatch", "would break pairs; set it to auto, warn or stop"
    if algorithm.advantage.per_token:
        message = "compares completions by one advantage each; use one of groups, as {kind: grpo, scale: none}"
        yield "algorithm.preference.kind", message
    if not (algorithm.selection and SELECTIONS.holds(algorithm.selection[-1], "best_and_worst")):
        yield "algorithm.preference.kind", "needs pairs; end algorithm.selection with {kind: best_and_worst}"


def epochs_measure_the_kl(train: TrainConfig) -> Findings:
    """Refuse `train.target_kl` for online DPO, which has no ratio to a proximal policy."""
    if train.target_kl is not None:
        yield "train.target_kl", "online DPO measures no approximate KL of an epoch; set it to null"


def penalties_have_their_policy(algorithm: AlgorithmConfig, train: TrainConfig) -> Findings:
    """A penalty must be towards a policy that differs from the current one and that nothing else names better."""
    if getattr(algorithm.reference_kl, "towards", "reference") != "reference":
        message = "must be reference here; another policy goes into algorithm.penalty"
        yield "algorithm.reference_kl.towards", f"{message}, as [{{kind: k3, towards: behavior}}]"
    for i, spec in enumerate(algorithm.penalty):
        if getattr(spec, "towards", "") == "proximal" and algorithm.preference is None:
            for message in _problems_of_proximal(algorithm, train):
                yield f"algorithm.penalty.{i}.towards", message


def _problems_of_proximal(algorithm: AlgorithmConfig, train: TrainConfig) -> Iterator[str]:
    if algorithm.proximal == "behavior":
        remedy = "set this to behavior, or algorithm.proximal=recompute"
        yield f"algorithm.proximal=behavior computes no proximal log-probs; {remedy}"
    elif algorithm.proximal != "loglinear" and train.updates_per_step * train.epochs_per_step == 1:
        message = "has no effect: in the only update of a step the policy is still the proximal one"
        yield f"{message}; set this to behavior, or train.updates_per_step above 1"
