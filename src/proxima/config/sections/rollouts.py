"""Checks of `rollouts`, a replay: a run on the stored rollouts of another run. That run fixes the settings that decided
which groups were generated and how they were scored; this recipe decides what happens to the groups afterwards."""

from pathlib import Path
from typing import Any

from proxima.config.batch_arithmetic import prompts_and_kept
from proxima.config.comparable import ABSENT, flat_values
from proxima.config.describe import setting
from proxima.config.outcomes import settled_as
from proxima.config.problems import ConfigError, Problem
from proxima.config.resolution import resolve
from proxima.config.resolved import Findings, Resolved
from proxima.config.scalars import in_one_line
from proxima.config.schema import RunConfig
from proxima.core import SELECTIONS
from proxima.core.advantage.protocol import needs_baseline

STORED = (  # the sections and fields that decided what is stored
    *("task", "reward", "seed", "data", "sampling"),
    *("engine.top_k_log_probs", "engine.sampling_mask", "engine.routed_experts", "train.completions_per_prompt"),
)
NOT_STORED = ("data.check_answers", "data.max_unreadable")  # only used before a run starts
DYNAMIC = "algorithm.dynamic_sampling"


def stored_groups_are_as_configured(r: Resolved[Any], folder: str | None, rollouts: str | None) -> Findings:
    """The replayed run must have stored what this config would generate, in another folder than this run's."""
    if rollouts is None:
        return
    place = r.config.replayed
    if folder is not None and Path(folder).expanduser().resolve() == place.resolve():
        yield "folder", "is the run whose rollouts are replayed; give the replay its own, folder=PATH"
    if not (place / "config.yaml").is_file():
        what = "is a folder without config.yaml" if place.is_dir() else "does not exist"
        yield "rollouts", f"{what}; give the folder of a run, which `proxima train` printed"
        return
    try:
        before: RunConfig = resolve(place, import_code=r.import_code).config
    except ConfigError as error:
        message = f"its config.yaml can't be read ({error.problems[0]}); it may be of another version of proxima"
        yield "rollouts", message
        return
    yield from _differing_fields(r, before)
    yield from _unsupplied(r, before)


def _differing_fields(r: Resolved[Any], before: RunConfig) -> Findings:
    """Yield the first differing field of each part of the config that decided what was generated."""
    first = flat_values(before)
    second = flat_values(settled_as(r.config, before))
    differing = list[str]()
    for path in dict.fromkeys([*second, *first]):
        if not _below(path, NOT_STORED) and first.get(path, ABSENT) != second.get(path, ABSENT):
            differing.append(path)
    places = list(STORED)
    if r.config.algorithm.dynamic_sampling is not None:  # without it, a step trains on the groups that are stored
        places.append(DYNAMIC)
    for place in places:
        below = [path for path in differing if _below(path, (place,))]
        if not below:
            continue
        path = below[0]
        was = in_one_line(first[path]) if path in first else "a config without it"
        now = in_one_line(second[path]) if path in second else "absent"
        remedy = f"set {DYNAMIC}=null" if place == DYNAMIC else "use the same"
        message = f"differs from {was}, with which {r.config.rollouts} generated its rollouts; {remedy}"
        where = next((entry.where for entry in r.entries if entry.path == path), None)
        yield Problem(path, message, now, where)


def _unsupplied(r: Resolved[Any], before: RunConfig) -> Findings:
    """Yield the requirements of the algorithm that the stored rollouts don't meet."""
    sizes = [
        prompts_and_kept(c.train.prompts_per_step, c.train.completions_per_prompt, c.algorithm.selection)[0]
        for c in (before, r.config)
    ]
    if sizes[0] != sizes[1]:
        added = ""
        if sizes[1] != r.config.train.prompts_per_step:
            added = " (`prune` with `allocate` takes more)"
        message = f"a step would have {sizes[1]} prompts{added}, and those of {r.config.rollouts} have {sizes[0]}"
        yield "train.prompts_per_step", f"{message}; change it or algorithm.selection until they are equal"
    if _stops(before) and _kept(before) != _kept(r.config):
        message = (
            f"differs from that of {r.config.rollouts}, by which completions were stopped before they had a reward"
        )
        yield "algorithm.selection", f"{message}; use the same selection, with an advantage of the same centre"
    if needs_baseline(r.config.algorithm.advantage) and not needs_baseline(before.algorithm.advantage):
        message = f"needs greedy completions, which {r.config.rollouts} did not generate; use another advantage"
        yield "algorithm.advantage.kind", message


def _stops(config: RunConfig) -> bool:
    return any(SELECTIONS.holds(spec, "prune") and spec.stop for spec in config.algorithm.selection)


def _kept(config: RunConfig) -> tuple[Any, ...]:
    """What decides which completions of a group are kept, and so which can be stopped."""
    return setting(config.algorithm.advantage, "centre"), *config.algorithm.selection


def _below(path: str, places: tuple[str, ...]) -> bool:
    return any(f"{path}.".startswith(f"{place}.") for place in places)
