"""The `placement` section: the processes in which a run computes. The kinds with several are in `ranks_section`."""

import os
from dataclasses import dataclass
from typing import Any

from proxima.config.resolved import Findings, Resolved
from proxima.config.sections.model_section import ModelConfig

KIND = "placement.kind"
STARTED_BY = "PROXIMA_RANKS_STARTED_BY"  # set for ranks that something other than torchrun started
STARTED_AGAIN = "placement.restarts"  # in an error that already says what the ranks' supervisor will do
PLACED = "the processes that compute"


@dataclass(frozen=True, kw_only=True)
class LocalPlacement:
    """One process."""


def is_supervised() -> bool:
    """True if a cluster's supervisor has started this process, and restarts all ranks when one dies."""
    return STARTED_BY in os.environ


def gathered_weights_are_precise(placement: Any, model: ModelConfig) -> Findings:
    """Products in float32 need gathered weights in float32."""
    sharding = getattr(placement, "sharding", None)
    if getattr(sharding, "param_dtype", None) == "bfloat16" and model.compute_dtype == "float32":
        rounds = "rounds the weights that model.compute_dtype=float32 is to compute with"
        yield "placement.sharding.param_dtype", f"{rounds}; set model.compute_dtype=bfloat16, or leave it out"


def split_tokens_are_packed(placement: Any, model: ModelConfig) -> Findings:
    """Ranks that split tokens need them packed."""
    if getattr(placement, "context_parallel", 1) > 1 and model.attention not in ("auto", "packed"):
        message = f"splits packed tokens, and model.attention={model.attention} does not keep them so"
        yield "placement.context_parallel", f"{message}; set it to 1, or model.attention to auto"


def models_can_be_split(r: Resolved[Any], placement: Any) -> Findings:
    """The number of ranks must fit the placement's layout, and the models must be divisible among them."""
    if hasattr(placement, "sharding"):
        yield from placement.layout_problems(r)


def engines_can_rest(placement: Any, runtime: Any, algorithm: Any) -> Findings:
    """Nothing may call the servers while the ranks use the servers' devices."""
    if getattr(placement, "colocate", False):
        yield from placement.askers_during_updates(runtime, algorithm)
