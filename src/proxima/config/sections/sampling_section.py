"""Checks of the `sampling` section, a `Sampling` of `proxima.engine`: how training completions are sampled, and which
policies are compared with that distribution."""

from typing import Any

from proxima.config.resolved import Findings
from proxima.config.sections.algorithm_section import AlgorithmConfig
from proxima.engine.protocol import Sampling

SAMPLING_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
BEHAVIOR = "algorithm.behavior"
WIDE = 512  # ids per token that are few compared with its other data


def training_samples_at_random(sampling: Sampling) -> Findings:
    """Refuse temperature 0, which gives equal completions: a group has nothing to compare."""
    if sampling.temperature == 0:
        message = "training needs samples, 0 is greedy; set it > 0, evaluation is greedy by default"
        yield "sampling.temperature", message


def replays_sampling_masks(sampling: Sampling, algorithm: AlgorithmConfig) -> bool:
    """True if the policy's log-probs are over the tokens that could be sampled, not over the whole vocabulary."""
    return bool(sampling.truncates) and algorithm.behavior == "sampled"


def behavior_matches_sampling(sampling: Sampling, algorithm: AlgorithmConfig, engine: Any) -> Findings:
    """A ratio of the policy to a truncated distribution needs the tokens that remained, or it is off by their mass."""
    if not replays_sampling_masks(sampling, algorithm) or "sampling_mask" in getattr(engine, "provides", ()):
        return
    cut = next(name for name, off in SAMPLING_OFF.items() if getattr(sampling, name) != off)
    message = "behavior=sampled compares the policy with the truncated distribution"
    remedy = f"set {BEHAVIOR}=untruncated or {cut}={SAMPLING_OFF[cut]}"
    if hasattr(engine, "sampling_mask"):
        message += ", and needs the tokens that could be sampled"
        remedy = f"set engine.sampling_mask=true, {BEHAVIOR}=untruncated or {cut}={SAMPLING_OFF[cut]}"
    yield f"sampling.{cut}", f"{message}; {remedy}"


def sampling_masks_are_replayed(sampling: Sampling, algorithm: AlgorithmConfig) -> Findings:
    """A comparison of policies over the whole vocabulary can't be combined with one over fewer tokens."""
    if not replays_sampling_masks(sampling, algorithm):
        return
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
