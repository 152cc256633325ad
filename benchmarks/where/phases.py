"""What a run's own functions are called here: the phases of a step, and the kinds of work within them.

Nothing is copied: functions are replaced by themselves with a clock around them while a measurement runs.
"""

import functools
import importlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

#: phase → functions whose time it is, with all that they call
PHASES: Mapping[str, tuple[str, ...]] = {
    "prefill": ("proxima.engine.scheduler:Scheduler._admit",),
    "decode": ("proxima.engine.scheduler:Scheduler._decode",),
    "publish": ("proxima.engine.scheduler:Scheduler.load",),
    "forward": ("proxima.model.policy:Policy.__call__",),
    "backward": ("torch:Tensor.backward",),
    "optimizer": ("proxima.train.stack:TrainStack._step", "proxima.train.stack:TrainStack._weight_norm"),
}
#: kind of work → functions within which an operation belongs to it, whatever it is called
REGIONS: Mapping[str, tuple[str, ...]] = {
    "attention": (
        "proxima.engine.decoder:cached_attention",
        "proxima.engine.decoder:causal_attention",
        "proxima.model.attention:attend_segments",
    ),
    "vocabulary": ("proxima.engine.scheduler:sample_tokens", "proxima.model.policy:token_log_prob"),
}
PHASE, REGION = "phase/", "kind/"


def find(place: str) -> tuple[Any, str]:
    """The module or class of `module:name` or `module:Class.name`, and the name in it.

    Raises:
        RuntimeError: it was renamed.
    """
    module, _, path = place.partition(":")
    *classes, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for one in classes:
        owner = getattr(owner, one, None)
    if not hasattr(owner, name):
        raise RuntimeError(f"{place} does not exist; benchmarks/where/phases.py names it")
    return owner, name


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Clock:
    """Seconds of each phase. A phase within another one is part of that."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._inside = False

    @contextmanager
    def watch(self, *, profiled: bool = False) -> Iterator["Clock"]:
        """Measure the phases meanwhile; `profiled` marks them, and the regions, in a trace."""
        around = [(self._timed(phase, profiled), place) for phase, places in PHASES.items() for place in places]
        if profiled:
            around += [(_marked(kind), place) for kind, places in REGIONS.items() for place in places]
        undo = []
        try:
            for wrap, place in around:
                owner, name = find(place)
                function = getattr(owner, name)
                undo.append((owner, name, function))
                setattr(owner, name, wrap(function))
            yield self
        finally:
            for owner, name, function in reversed(undo):
                setattr(owner, name, function)

    def _timed(self, phase: str, profiled: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def timed(*args: Any, **kwargs: Any) -> Any:
                if self._inside:
                    return function(*args, **kwargs)
                self._inside = True
                synchronize()
                start = time.perf_counter()
                try:
                    with torch.profiler.record_function(PHASE + phase) if profiled else nullcontext():
                        return function(*args, **kwargs)
                finally:
                    synchronize()
                    self.seconds[phase] += time.perf_counter() - start
                    self._inside = False

            return timed

        return wrap


def _marked(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(REGION + kind):
                return function(*args, **kwargs)

        return marked

    return wrap
