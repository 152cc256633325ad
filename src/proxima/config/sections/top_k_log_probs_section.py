"""The check of `engine.top_k_log_probs`, imported only if a recipe switches them on."""

from typing import Any

from proxima.config.resolved import Findings, Resolved
from proxima.config.sections.sampling_section import SAMPLING_OFF
from proxima.core.correction import ScoreCentering
from proxima.data import UserError
from proxima.model.hub_names import is_at_hand
from proxima.model.pretrained import load_config


def top_k_is_usable(r: Resolved[Any]) -> Findings:
    """The vocabulary must have as many tokens, if the model's config is available locally; and a mean over the tokens
    that could be sampled needs the probabilities that they had, which the engine reports before truncation."""
    model, sampling = r.config.model, r.config.sampling
    vocabulary = _vocabulary(model.path, model.revision)
    if vocabulary is not None and r.config.engine.top_k_log_probs > vocabulary:
        yield "engine.top_k_log_probs", f"is more than the vocabulary of {model.path}; set it to {vocabulary} or less"
    if sampling.truncates and any(isinstance(spec, ScoreCentering) for spec in r.config.algorithm.correction):
        cut = next(name for name, off in SAMPLING_OFF.items() if getattr(sampling, name) != off)
        message = "truncates the distribution whose mean score_centering takes, and the engine reports it untruncated"
        yield f"sampling.{cut}", f"{message}; set it to {SAMPLING_OFF[cut]:g}"


def _vocabulary(path: str, revision: str | None) -> int | None:
    """The model's number of tokens; None if its config is not here, or can't be read, which other checks report."""
    try:
        config = load_config(path, revision).get_text_config() if is_at_hand(path, revision) else None
    except UserError:
        return None
    return getattr(config, "vocab_size", None)
