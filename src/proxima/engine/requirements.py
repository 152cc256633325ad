"""Checks for `EngineSpec.check` of an engine outside this process: whether it meets a run's requirements, with
remedies."""

from proxima.data import UserError
from proxima.engine.protocol import Capabilities, EngineRequirements, Sampling

TRUNCATED_IMPORTANCE_SAMPLING = "[{kind: importance, level: token, bound: truncate, upper: 2}]"
OFF = {"top_k": 0, "top_p": 1, "min_p": 0}  # values that exclude no token


def check_log_probs(needs: EngineRequirements, capabilities: Capabilities, engine: str) -> list[str]:
    """Check that an engine returns the log-probs that the loss reads, for the sampling of the training.

    Args:
        capabilities: the engine's capabilities.
        engine: its name, for messages: `http://127.0.0.1:8000 (vllm 0.32.0)`.

    Returns: a warning if only metrics lack their log-probs.

    Raises:
        UserError: the loss would read a missing column; with remedies for this engine and sampling.
    """
    if needs.training is None:
        return []
    absent = (needs.log_probs | needs.measured) - capabilities.log_probs_for(needs.training)
    for name in sorted(absent & needs.log_probs):
        reason = f"the loss reads {name}_log_prob (algorithm.behavior={name}), and {engine} does not give it"
        raise UserError(
            f"{reason} at {_described(needs.training, capabilities)}", remedy=_remedy(needs.training, capabilities)
        )
    if absent:
        names = ", ".join(f"{name}_log_prob" for name in sorted(absent))
        return [f"{engine} gives no {names}: the mismatch/ metrics are absent; {_remedy(needs.training, capabilities)}"]
    return []


def _described(sampling: Sampling, capabilities: Capabilities) -> str:
    what = {
        "processed": "of the distribution really sampled",
        "untruncated": "of softmax(logits / temperature)",
        "raw": "of softmax(logits)",
    }[capabilities.log_probs]
    cut = "".join(f" {name}={getattr(sampling, name):g}" for name in _cuts(sampling))
    return f"sampling.temperature={sampling.temperature:g}{cut}: its log-probs are {what}"


def _cuts(sampling: Sampling) -> list[str]:
    return [name for name, off in OFF.items() if getattr(sampling, name) != off]


def _remedy(sampling: Sampling, capabilities: Capabilities) -> str:
    if capabilities.log_probs == "untruncated":
        return f"set algorithm.behavior=untruncated, or {_untruncated(sampling)}"
    if capabilities.log_probs == "raw":
        served = "start the server with processed log-probs (vLLM: --logprobs-mode processed_logprobs)"
        return served if sampling.temperature != 1 else f"{served}, or set {_untruncated(sampling)}"
    other = f"set {_untruncated(sampling)}"
    if not capabilities.score:
        return other
    return f"{other}, or sampling.temperature=1, at which the server can score the tokens"


def _untruncated(sampling: Sampling) -> str:
    return " ".join(f"sampling.{name}={OFF[name]}" for name in _cuts(sampling))


def check_scoring(needs: EngineRequirements, capabilities: Capabilities, engine: str) -> None:
    """Check that an engine can score tokens as the run requires.

    Raises:
        UserError: it does not score, or not at this temperature.
    """
    if not needs.score_temperatures:
        return
    forward = f"or let the trainer run the {needs.role}: set its engine to null"
    if not capabilities.score:
        raise UserError(
            f"{engine} does not score tokens, which the {needs.role} is for", remedy=f"use another, {forward}"
        )
    if capabilities.log_probs != "both" and (wrong := [t for t in needs.score_temperatures if t not in (0, 1)]):
        reason = f"{engine} scores tokens under softmax(logits) alone, and sampling.temperature is {wrong[0]:g}"
        raise UserError(reason, remedy=f"set sampling.temperature=1, {forward}")


def precision_notes(
    needs: EngineRequirements, *, dtype: str | None, quantization: str | None, engine: str
) -> list[str]:
    """Warn if the engine computes with much less precision than the trainer and the algorithm does not correct for it.

    Args:
        dtype, quantization: of the engine's weights; None: not reported, or not quantized.
    """
    if needs.training is None or needs.corrected:
        return []
    remedy = (
        f"mismatch/ measures it; to weight the tokens: algorithm.proximal=recompute "
        f"algorithm.correction='{TRUNCATED_IMPORTANCE_SAMPLING}'"
    )
    if quantization is not None:
        return [f"{engine} samples from weights in {quantization}, and the loss corrects for no difference: {remedy}"]
    coarse = dtype in ("float16", "bfloat16", "half") and needs.compute_dtype == "float32"
    if coarse or (dtype is not None and "8" in dtype):
        return [f"{engine} computes in {dtype}, the trainer in {needs.compute_dtype}, uncorrected: {remedy}"]
    return []
