"""The durations of a simulated run: those of a plan, and what no plan knows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from statistics import fmean

from proxima.data.random import SIMULATED_BLOCK, SIMULATED_DRAW, mix, permutation
from proxima_plan.forecast import StepPlan
from proxima_plan.stage_times import Sequences
from proxima_plan.step_load import Load

DRAWS = 1024  # of the lengths, for their mean
_order = lru_cache(maxsize=64)(permutation)  # of a pass over observed numbers


@dataclass(frozen=True)
class Observed:
    """Lengths of completions that were observed, each drawn equally often; every pass over them has a different order.
    `together` neighbours are drawn as a block for the completions of one prompt: easy questions have short answers."""

    values: tuple[int, ...]
    together: int = 1

    def draw(self, seed: int, uid: int, sample: int) -> float:
        """Draw the tokens of a completion, by counter: a draw depends on its keys alone."""
        blocks = len(self.values) // self.together
        order = _order(blocks, SIMULATED_BLOCK, seed, uid // blocks)
        return float(self.values[int(order[uid % blocks]) * self.together + sample % self.together])


@dataclass(frozen=True)
class Assumptions:
    """What a simulation takes beside a plan.

    Args:
        mean: tokens of a completion; None: a share of the maximum. observed: lengths, instead of a distribution with
            that mean. prompt: tokens of a prompt, instead of the longest.
        score: seconds until the rewards of a group are known.
        accepted: share of the groups that dynamic sampling keeps.
        engine, trainer: how many times longer each takes than its plan.
    """

    mean: float | None = None
    observed: Observed | None = None
    prompt: int | None = None
    score: float = 0.1
    accepted: float = 1.0
    engine: float = 1.0
    trainer: float = 1.0

    def load(self, load: Load) -> Load:
        """Return the load of a step with the observed lengths."""
        if self.observed is None or self.prompt is None:
            return load
        mean = fmean(min(load.longest, length) for length in self.observed.values)
        return replace(load, prompt=self.prompt, mean=mean, endless=0.0)


@dataclass(frozen=True)
class Times:
    """The durations of a simulated run, in seconds.

    A decode step gives each running completion of an engine a token. A prefill is that of a prompt before its first
    completion and, under `engine.interrupt: recompute`, of all that runs when weights are published. An update includes
    the forward passes before it.
    """

    plan: StepPlan
    assumed: Assumptions

    @property
    def load(self) -> Load:
        return self.plan.load

    @cached_property
    def context(self) -> float:
        """Tokens of a running completion, prompt included, averaged over time."""
        lengths = [self.load.quantile((i + 0.5) / DRAWS) for i in range(DRAWS)]
        return self.load.prompt + fmean(x * x for x in lengths) / (2 * fmean(lengths))

    @cached_property
    def publish(self) -> float:
        return self.plan.times.publish().seconds

    @property
    def other(self) -> float:
        """Of a step outside of all stages."""
        return self.assumed.trainer * self.plan.times.rest().seconds

    def length(self, seed: int, uid: int, sample: int) -> float:
        """Draw the tokens that a completion would have without a limit."""
        if self.assumed.observed is not None:
            return self.assumed.observed.draw(seed, uid, sample)
        return self.load.quantile((mix(SIMULATED_DRAW, seed, uid, sample) + 0.5) / 2**64)

    @cached_property
    def decode_step(self) -> Callable[[int], float]:
        """The seconds of a decode step of so many running completions."""
        return cache(lambda running: self.assumed.engine * self.plan.times.decode_step(running, self.context)[0])

    def prefill(self, tokens: int) -> float:
        return self.assumed.engine * self.plan.times.prefill(tokens, self.load.prompt)

    def training(self, lengths: Sequence[int]) -> float:
        """Return the seconds to train on completions of these lengths."""
        load = self.load
        times = self.plan.times
        whole = [length + load.prompt_tokens for length in lengths]
        parts = max(1, load.updates // load.passes)
        updates = sum(times.update(Sequences.of(whole[i::parts])).seconds for i in range(min(parts, len(whole))))
        forward = 0.0
        if load.forwards:
            forward = load.forwards * times.forward(Sequences.of(whole)).seconds
        return self.assumed.trainer * (load.passes * updates + forward)
