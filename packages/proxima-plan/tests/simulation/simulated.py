"""Recipes and times whose simulated runs can be computed by hand."""

from dataclasses import dataclass, field, replace
from typing import Any

from proxima.config.resolution import resolve
from proxima.config.schema import RunConfig
from proxima_plan.simulation.simulated_run import simulate_run
from proxima_plan.simulation.times import Assumptions
from proxima_plan.step_load import Load

PROMPTS, COMPLETIONS, TOKENS = 4, 2, 10
RECIPE: dict[str, Any] = {
    "model": {"path": "no-such-model"},
    "task": "arithmetic",
    "reward": "number",
    "algorithm": "grpo",
    "engine": {"kind": "local_process", "slots": 64},
    "sampling": {"max_tokens": 100},
    "train": {"steps": 12, "prompts_per_step": PROMPTS, "completions_per_prompt": COMPLETIONS},
}
PREFILL = 0.02  # of a prompt
DECODE = TOKENS * (0.1 + 0.01 * PROMPTS * COMPLETIONS)  # of a step's completions at once
TRAIN = 0.5 + 0.01 * PROMPTS * COMPLETIONS * TOKENS
PUBLISH = 0.125


@dataclass(frozen=True, kw_only=True)
class ByHand:
    """Stands in for `Times`: a decode step of n completions takes .1 + .01 n; an update .5 + .01 for each of its 80
    tokens. `lengths`: tokens by uid, one after the other."""

    lengths: tuple[int, ...] = (TOKENS,)
    update: float = 0.5
    update_token: float = 0.01
    prefill_token: float = 0.001
    publish: float = PUBLISH
    other: float = 0.0
    assumed: Assumptions = field(default_factory=lambda: Assumptions(score=0.25))
    load: Load = field(default_factory=lambda: Load(8, 2, 20, 10.0, 100))

    def length(self, seed: int, uid: int, sample: int) -> float:
        return float(self.lengths[uid % len(self.lengths)])

    def decode_step(self, running: int) -> float:
        return 0.1 + 0.01 * running

    def prefill(self, tokens: int) -> float:
        return self.prefill_token * tokens

    def training(self, lengths: Any) -> float:
        return self.update + self.update_token * sum(lengths)


@dataclass(frozen=True, kw_only=True)
class Drawn(ByHand):
    """Lengths of a lognormal with a long tail, cut off at `longest`."""

    longest: int = 100
    mean: float = 20.0
    spread: float = 1.0

    def length(self, seed: int, uid: int, sample: int) -> float:
        from proxima.data.random import SIMULATED_DRAW, mix

        load = replace(self.load, mean=self.mean, longest=self.longest, spread=self.spread, endless=0.0)
        return load.quantile((mix(SIMULATED_DRAW, seed, uid, sample) + 0.5) / 2**64)


def config(*overrides: str) -> RunConfig:
    return resolve(RECIPE, overrides).config


def simulated(
    *overrides: str, times: ByHand | None = None, replicas: int = 1, slots: int = 64, in_thread: bool = False
) -> list[dict[str, Any]]:
    given: Any = times or ByHand()
    return simulate_run(config(*overrides), given, replicas, slots, in_thread=in_thread)
