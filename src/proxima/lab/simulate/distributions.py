"""Distributions of lengths and latencies for simulated completions and rewards, drawn by counters."""

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Annotated, Protocol

from proxima.data import require
from proxima.data.kinds import Kinds
from proxima.data.random import SIMULATED_BLOCK, SIMULATED_DRAW, mix, permutation

STANDARD = NormalDist()
_order = lru_cache(maxsize=64)(permutation)  # of a pass over observed numbers


class Distribution(Protocol):
    """Non-negative numbers by counter: a draw depends on its keys alone."""

    def draw(self, seed: int, uid: int, sample: int) -> float:
        """Draw the number of a completion; `sample` is 0 for a quantity that each prompt has once."""


@dataclass(frozen=True)
class Constant:
    """Always the same."""

    value: Annotated[float, "tokens, or seconds"]

    def __post_init__(self) -> None:
        require(0 <= self.value < math.inf, "value", self.value, "must be >= 0 and finite")

    def draw(self, seed: int, uid: int, sample: int) -> float:
        return self.value


@dataclass(frozen=True)
class LogNormal:
    """exp(m + sigma z), z standard normal, with m = log(mean) - sigma^2 / 2: the larger sigma, the longer the tail. At
    sigma = 1 the 99th percentile is 6.2 times the mean."""

    mean: Annotated[float, "tokens, or seconds, > 0"]
    sigma: Annotated[float, "standard deviation of the logarithm"] = 0.7

    def __post_init__(self) -> None:
        require(0 < self.mean < math.inf, "mean", self.mean, "must be > 0 and finite")
        require(0 <= self.sigma < 10, "sigma", self.sigma, "must be in [0, 10)", remedy="0 is constant")

    def draw(self, seed: int, uid: int, sample: int) -> float:
        share = (mix(SIMULATED_DRAW, seed, uid, sample) + 0.5) / 2**64
        return self.mean * math.exp(self.sigma * STANDARD.inv_cdf(min(share, 1 - 2**-53)) - self.sigma**2 / 2)


@dataclass(frozen=True)
class Empirical:
    """Observed numbers, each drawn equally often; every pass over them has a different order.

    `together` neighbours are drawn as a block for the completions of one prompt: easy questions have short answers.
    """

    values: Annotated[tuple[float, ...], "tokens, or seconds"]
    together: Annotated[int, "neighbours that belong to one prompt"] = 1

    def __post_init__(self) -> None:
        bad = [value for value in self.values if not 0 <= value < math.inf]
        require(bool(self.values) and not bad, "values", bad or [], "must be numbers >= 0, at least one")
        whole = self.together >= 1 and len(self.values) % self.together == 0
        require(whole, "together", self.together, f"must divide the {len(self.values)} values")

    def draw(self, seed: int, uid: int, sample: int) -> float:
        blocks = len(self.values) // self.together
        order = _order(blocks, SIMULATED_BLOCK, seed, uid // blocks)
        return self.values[int(order[uid % blocks]) * self.together + sample % self.together]


DISTRIBUTIONS = Kinds(
    {
        "constant": "proxima.lab.simulate.distributions:Constant",
        "empirical": "proxima.lab.simulate.distributions:Empirical",
        "lognormal": "proxima.lab.simulate.distributions:LogNormal",
    }
)
