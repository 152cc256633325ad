"""Recipes and times whose simulated runs can be computed by hand."""

from typing import Any

from proxima.config import RunConfig, resolve
from proxima.lab.simulate.distributions import Constant
from proxima.lab.simulate.simulated_run import SimulatedRun, simulate_run
from proxima.lab.simulate.timed_engine import Fleet
from proxima.lab.simulate.times import Times

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
# a decode step of n completions takes .1 + .01 n; an update .5 + .01 for each of its 80 tokens
TIMES = Times(
    length=Constant(TOKENS),
    prompt_length=20,
    step=0.1,
    sequence=0.01,
    prefill_token=0.001,
    score=Constant(0.25),
    update=0.5,
    update_token=0.01,
    publish=0.125,
)
PREFILL = 0.02  # of a prompt
DECODE = TOKENS * (0.1 + 0.01 * PROMPTS * COMPLETIONS)  # of a step's completions at once
TRAIN = 0.5 + 0.01 * PROMPTS * COMPLETIONS * TOKENS


def config(*overrides: str) -> RunConfig:
    return resolve(RECIPE, overrides).config


def simulated(*overrides: str, times: Times = TIMES, fleet: Fleet | None = None) -> SimulatedRun:
    return simulate_run(config(*overrides), times, fleet)
