"""Checks of the `sampling` section, the `Sampling` of `proxima.engine`: against the batch, the behavior policy and what
the engine reports."""

from typing import Any

from proxima.config.describe import setting
from proxima.config.resolved import Findings
from proxima.config.sections.algorithm import AlgorithmConfig, supplied_by
from proxima.config.sections.data import longest_of
from proxima.config.sections.model import ModelConfig
from proxima.config.sections.train import TrainConfig
from proxima.core.correction.score_centering import ScoreCentering
from proxima.data import UserError
from proxima.engine.protocol import Sampling
from proxima.model.files import is_at_hand
from proxima.model.pretrained import load_config
from proxima.task.mix import sources_of

SAMPLING_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
BEHAVIOR = "algorithm.behavior"
WIDE = 512  # ids per token that are few compared with its other data


def training_samples_at_random(sampling: Sampling) -> Findings:
    """Refuse temperature 0, which gives equal completions: a group has nothing to compare."""
    if sampling.temperature == 0:
        message = "training needs samples, 0 is greedy; set it > 0, evaluation is greedy by default"
        yield "sampling.temperature", message


def behavior_matches_sampling(sampling: Sampling, algorithm: AlgorithmConfig, engine: Any) -> Findings:
    """A ratio of the policy to a truncated distribution needs the tokens that remained, or it is off by their mass; and
    a comparison of policies over the whole vocabulary can't be combined with one over fewer tokens."""
    if not replays_sampling_masks(sampling, algorithm):
        return
    if "sampling_mask" not in supplied_by(engine):
        cut = next(name for name, off in SAMPLING_OFF.items() if getattr(sampling, name) != off)
        message = "behavior=sampled compares the policy with the truncated distribution"
        remedy = f"{BEHAVIOR}=untruncated or {cut}={SAMPLING_OFF[cut]}"
        if hasattr(engine, "sampling_mask"):
            message += ", and needs the tokens that could be sampled"
            remedy = f"engine.sampling_mask=true, {remedy}"
        yield f"sampling.{cut}", f"{message}; set {remedy}"
    why = "under truncating sampling, behavior=sampled compares over the sampled tokens"
    for slot in ("surrogate", "aggregate", "reference_kl"):
        spec = getattr(algorithm, slot)
        if spec is not None and "top_k_log_prob" in spec.needs:
            message = f"compares the most probable tokens of the whole vocabulary; {why}"
            remedy = f"set its divergence=binary_tv, or {BEHAVIOR}=untruncated"
            yield f"algorithm.{slot}.kind", f"{message}; {remedy}"
    if algorithm.distillation is not None:
        message = f"a teacher is compared over the whole vocabulary; {why}; set {BEHAVIOR}=untruncated"
        yield "algorithm.distillation.path", message
    if algorithm.preference is not None:
        message = f"pairs are compared by their likelihood over the whole vocabulary; set {BEHAVIOR}=untruncated"
        yield "algorithm.preference.kind", message
    if algorithm.proximal == "next":
        message = f"the log-probs of the next version are over the whole vocabulary; {why}"
        yield "algorithm.proximal", f"{message}; set it to recompute, or {BEHAVIOR}=untruncated"
    if algorithm.reference_engine is not None and algorithm.needs_reference:
        message = f"an engine scores over the whole vocabulary; {why}; set it to null, or {BEHAVIOR}=untruncated"
        yield "algorithm.reference_engine", message


def sampling_masks_are_small(sampling: Sampling, algorithm: AlgorithmConfig) -> Findings:
    """Warn if masks may be large: where the policy is unsure, top-p and min-p alone keep much of the vocabulary."""
    if replays_sampling_masks(sampling, algorithm) and not 0 < sampling.top_k <= WIDE:
        message = f"the ids of all tokens that could be sampled go to the trainer; {WIDE} bounds them and seldom binds"
        yield "sampling.top_k", message


def replays_sampling_masks(sampling: Sampling, algorithm: AlgorithmConfig) -> bool:
    """True if the policy's log-probs are over the tokens that could be sampled, not over the whole vocabulary."""
    return bool(sampling.truncates) and algorithm.behavior == "sampled"


def top_k_is_usable(model: ModelConfig, sampling: Sampling, algorithm: AlgorithmConfig, engine: Any) -> Findings:
    """The vocabulary must have as many tokens, if the model's config is available locally; and a mean over the tokens
    that could be sampled needs the probabilities that they had, which the engine reports before truncation."""
    reported = setting(engine, "top_k_log_probs", 0)
    if not reported:
        return
    vocabulary = _vocabulary(model.path, model.revision)
    if vocabulary is not None and reported > vocabulary:
        yield "engine.top_k_log_probs", f"is more than the vocabulary of {model.path}; set it to {vocabulary} or less"
    if sampling.truncates and any(isinstance(spec, ScoreCentering) for spec in algorithm.correction):
        cut = next(name for name, off in SAMPLING_OFF.items() if getattr(sampling, name) != off)
        message = "truncates the distribution whose mean score_centering takes, and the engine reports it untruncated"
        yield f"sampling.{cut}", f"{message}; set it to {SAMPLING_OFF[cut]:g}"


def _vocabulary(path: str, revision: str | None) -> int | None:
    """The model's number of tokens; None if its config is not here, or can't be read, which other checks report."""
    try:
        config = None
        if is_at_hand(path, revision):
            config = load_config(path, revision).get_text_config()
    except UserError:
        return None
    return getattr(config, "vocab_size", None)


def completions_fit_micro_batch(task: Any, sampling: Sampling, train: TrainConfig) -> Findings:
    """Warn if a completion may exceed the token budget of one forward."""
    tokens, field = longest_of(sources_of(task), sampling)
    if tokens > train.tokens_per_micro_batch:
        message = f"a completion may have {tokens} tokens ({field}): it is forwarded alone, over budget"
        yield "train.tokens_per_micro_batch", message
