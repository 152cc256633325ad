"""Checks of the engines beside the one that generates, and what `explain` says of engines elsewhere."""

from collections.abc import Iterator
from typing import Any

from proxima.config.describe import kind_of
from proxima.config.problems import Problem
from proxima.config.resolve import Resolved

ENGINES = "proxima.engine:ENGINES"


def reference_engine_is_asked(r: Resolved[Any]) -> Iterator[Problem]:
    """Nothing is scored where loss and reward read no reference."""
    algorithm = r.config.algorithm
    if algorithm.reference_engine is not None and not algorithm.needs_reference:
        message = "has no effect: nothing reads the reference; set algorithm.reference_kl or reward_kl, or leave it out"
        yield r.problem("algorithm.reference_engine.kind", message)


def engine_notes(config: Any) -> Iterator[str]:
    """What engines that are servers will be asked, and what they get. An engine in this process gives no line."""
    algorithm = config.algorithm
    places = [("engine", config.engine, "prompts, completions and, at the start and after each step, all weights")]
    if algorithm.needs_reference:
        places.append(("algorithm.reference_engine", algorithm.reference_engine, "tokens, for the reference"))
    if algorithm.distillation is not None:
        places.append(("algorithm.distillation.engine", algorithm.distillation.engine, "tokens, for the teacher"))
    for path, spec, goods in places:
        if (urls := getattr(spec, "urls", None)) is not None:
            yield f"{path}: {kind_of(spec, ENGINES)} {_where(spec, urls)} gets {goods}"
    if getattr(config.engine, "urls", None) is not None:
        folder = config.engine.weight_folder or "a folder in memory (/dev/shm)"
        yield (
            f"engine: new weights are written to {folder} (weights={config.engine.weights}), read by each server and "
            f"proven by {config.engine.probe_tokens} tokens; their memory is in no figure, and the time to generate is "
            "that of the engine here"
        )


def _where(spec: Any, urls: tuple[str, ...]) -> str:
    if spec.serve is None:
        return f"at {', '.join(urls)}"
    count = spec.serve.replicas
    return f"in {count} process{'es' if count > 1 else ''} of its own, started and ended with the run,"
