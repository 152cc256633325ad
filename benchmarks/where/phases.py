"""The functions of a run that make up the phases of a step, and the kinds of work within them.

No code is copied: the functions are wrapped with a clock while a measurement runs.
"""

import functools
import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from benchmarks.side import clock

#: phase → functions whose time it is, with all that they call
PHASES: Mapping[str, tuple[str, ...]] = {
    "prefill": ("proxima.engine.local.scheduler:Scheduler._start_waiting",),
    "decode": ("proxima.engine.local.scheduler:Scheduler._decode",),
    "publish": ("proxima.engine.local.scheduler:Scheduler.load",),
    "forward": ("proxima.model.policy:Policy.__call__",),
    "backward": ("torch:Tensor.backward",),
    "optimizer": ("proxima.training.stack:TrainStack._step", "proxima.training.stack:TrainStack._weight_norm"),
}
#: kind of work → functions within which an operation belongs to it, whatever it is called
REGIONS: Mapping[str, tuple[str, ...]] = {
    "attention": (
        "proxima.engine.local.decoder:cached_attention",
        "proxima.engine.local.decoder:causal_attention",
        "proxima.model.attention:attend_segments",
    ),
    "vocabulary": ("proxima.engine.local.scheduler:sample_tokens", "proxima.model.policy:token_log_prob"),
}
#: the package of compiled kernels, which no profiler sees: the time of their classes' methods is its own
KERNELS = "proxima.kernels"
PHASE, REGION, KERNEL = "phase/", "kind/", "kernel/"


def find(place: str) -> tuple[Any, str]:
    """Return the module or class of `module:name` or `module:Class.name`, and the name in it.

    Raises:
        RuntimeError: it doesn't exist; it was probably renamed.
    """
    module, _, path = place.partition(":")
    *classes, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for attribute in classes:
        owner = getattr(owner, attribute, None)
    if not hasattr(owner, name):
        raise RuntimeError(f"{place} does not exist; benchmarks/where/phases.py names it")
    return owner, name


def kernels() -> Iterator[str]:
    """Yield the places of all public methods of classes in KERNELS, and of functions `…_kernel`, which return one."""
    for info in pkgutil.iter_modules(importlib.import_module(KERNELS).__path__):
        module = importlib.import_module(f"{KERNELS}.{info.name}")
        for name, owner in vars(module).items():
            if name.endswith("_kernel"):
                yield f"{module.__name__}:{name}"
            if inspect.isclass(owner) and owner.__module__ == module.__name__:
                methods = [each for each, call in vars(owner).items() if inspect.isfunction(call)]
                public = [each for each in methods if each == "__call__" or not each.startswith("_")]
                yield from (f"{module.__name__}:{name}.{method}" for method in public)


class Clock:
    """The seconds of each phase. A phase within another one counts for the outer one."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._inside = False

    @contextmanager
    def watch(self, *, profiled: bool = False) -> Iterator["Clock"]:
        """Measure the phases within the context; `profiled` marks them, and the regions, in a trace."""
        around = [(self._timed(phase, profiled), place) for phase, places in PHASES.items() for place in places]
        if profiled:
            around += [(_marked(REGION + kind), place) for kind, places in REGIONS.items() for place in places]
            for place in kernels():
                name = place.rpartition(":")[2]
                mark = _marked(KERNEL + name)
                around.append((partial(_returning, mark) if name.endswith("_kernel") else mark, place))
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
                start = clock()
                try:
                    with torch.profiler.record_function(PHASE + phase) if profiled else nullcontext():
                        result = function(*args, **kwargs)
                        if profiled:
                            clock()  # the GPU's work lies within the phase
                        return result
                finally:
                    self.seconds[phase] += clock() - start
                    self._inside = False

            return timed

        return wrap


def _returning(mark: Callable[[Any], Any], make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `make` so that the kernel it returns is marked."""

    def made(*args: Any, **kwargs: Any) -> Any:
        kernel = make(*args, **kwargs)
        return None if kernel is None else mark(kernel)

    return made


def _marked(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(name):
                return function(*args, **kwargs)

        return marked

    return wrap
