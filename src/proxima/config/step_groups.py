"""The groups of a step: how many prompts it takes, and how many of their completions are trained on."""

import math
from collections.abc import Sequence
from typing import Any

from proxima.core import SELECTIONS
from proxima.core.selection.protocol import prompts_factor
from proxima.rollout.dynamic_sampling import DynamicSampling


def pruned(prompts: int, size: int, selection: Sequence[object]) -> tuple[int, int | None]:
    """The prompts per step, including those that `allocate` adds, and the completions of each that are trained on;
    None: all. From `train.prompts_per_step`, `train.completions_per_prompt` and the specs that prune."""
    specs: list[Any] = [spec for spec in selection if SELECTIONS.holds(spec, "prune")]
    prompts *= prompts_factor(specs, size)
    kept = size
    for spec in specs:
        kept = spec.kept(kept) if spec.scope == "group" else math.ceil(spec.kept(prompts * kept) / prompts)
    return prompts, kept if specs else None


def at_once(prompts: int, refill: DynamicSampling | None) -> int | None:
    """Prompts of a generation batch: 0 if the running acceptance decides, None without dynamic sampling."""
    return None if refill is None else refill.generation_batch(prompts) or 0


def group_arithmetic(prompts: int, completions: int, kept: int | None, together: int | None) -> str:
    """Describe the sequences of a step, with pruning and dynamic sampling:
    `8 prompts × 16 completions = 128 sequences, 4 of 16 kept, 96 prompts at a time until it is full`."""
    factors = ((prompts, "prompt"), (completions, "completion"), (prompts * completions, "sequence"))
    left = "{} × {} = {}".format(*(f"{count:,} {noun}{'s' * (count != 1)}" for count, noun in factors))
    left += "" if kept is None else f", {kept} of {completions} kept"
    filled = f"{together:,} prompts at a time" if together else "generated"
    return left if together is None else f"{left}, {filled} until it is full"
