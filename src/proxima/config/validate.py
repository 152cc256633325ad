"""The checks of a config before a run: its parts must fit each other and this machine.

A check is defined in the module of its section, and yields nothing where the recipe leaves its part out. All are listed
here, in the order in which a user reads their findings. Those in `CHECKS` stop the run; those in `WARNINGS` are only
shown.
"""

import importlib.util
import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from proxima.config.problems import ConfigError, Problem
from proxima.config.resolution import Recipe, Root, resolve
from proxima.config.resolved import Findings, Resolved
from proxima.config.schema import RunConfig
from proxima.config.sections import (
    algorithm,
    critic,
    data,
    eval,
    model,
    placement,
    preference,
    rollouts,
    runtime,
    sampling,
    train,
)
from proxima.config.tree import FILL_IN
from proxima.model.demo_model import download_demo_model, is_downloadable

Check = Callable[..., Findings]
PACKAGES = {  # a path → the kind that needs a package, or any; the package and what installs it
    "placement.kind": ("ray", "ray", "proxima-rl[ray]"),
    "model.lora.rank": ("", "peft", "proxima-rl[lora]"),
    "task.images": ("", "PIL", "proxima-rl[images]"),
    "episode.images": ("", "PIL", "proxima-rl[images]"),
    "train.optimizer.kind": ("adamw_8bit", "torchao", "proxima-rl[low-bit]"),
    "critic.optimizer.kind": ("adamw_8bit", "torchao", "proxima-rl[low-bit]"),
}
PACKAGES_OF_KINDS = {  # of slots and fields that occur in several places, by the last name of their path
    ("reward", "math"): ("math_verify", "proxima-rl[math]"),
    ("reward", "reasoning_gym"): ("reasoning_gym", "proxima-rl[gym]"),
    ("task", "dataset"): ("datasets", "proxima-rl[data]"),
    ("task", "reasoning_gym"): ("reasoning_gym", "proxima-rl[gym]"),
    ("task", "shapes"): ("PIL", "proxima-rl[images]"),
}


def values_are_filled_in(r: Resolved[Any]) -> Findings:
    """Refuse values whose comment says that they are placeholders to be filled in."""
    for entry in r.entries:
        if entry.where.endswith(FILL_IN):
            remedy = f"set it and remove the comment, or {entry.path}=… on the command line"
            yield entry.path, f"is a placeholder for a value that you have to fill in{_reason(entry.where)}; {remedy}"


def _reason(where: str) -> str:
    """The reason after the mark in the recipe's comment, for `FILE:LINE, TO FILL IN`; empty if it gives none."""
    name, _, line = where.removesuffix(f", {FILL_IN}").rpartition(":")
    with suppress(OSError, ValueError, IndexError):
        written = Path(name).expanduser().read_text(encoding="utf-8").splitlines()[int(line) - 1]
        reason = written.rpartition(FILL_IN)[2].strip(": ")
        return f" ({reason})" if reason else ""
    return ""


def packages_are_installed(r: Resolved[Any]) -> Findings:
    """What tasks, environments, rewards, places, adapters and optimizers need must be installed."""
    for entry in r.entries:
        kind, package, requirement = PACKAGES.get(entry.path, (None, "", ""))
        used = entry.value not in (None, False) and kind in ("", entry.value)
        name = re.sub(r"(\.\d+)?\.kind$", "", entry.path).rpartition(".")[2]
        value = entry.value
        if isinstance(value, dict):  # of an environment
            value = value.get("kind")
        if isinstance(value, str) and (name, value) in PACKAGES_OF_KINDS:
            used = True
            package, requirement = PACKAGES_OF_KINDS[name, value]
        if used and importlib.util.find_spec(package) is None:
            yield entry.path, _missing(package, requirement)
    for path, task in data.played_in(r.config).items():
        needs = getattr(data.environment_class(task), "needs", {})
        for package, requirement in needs.items():
            if importlib.util.find_spec(package) is None:
                yield f"{path}.environment", _missing(package, requirement)


def _missing(package: str, requirement: str) -> str:
    return f"needs the package {package.replace('_', '-')}: pip install '{requirement}'"


CHECKS: Sequence[Check] = (
    sampling.training_samples_at_random,
    sampling.behavior_matches_sampling,
    algorithm.groups_have_several_completions,
    algorithm.needed_tensors_are_supplied,
    algorithm.routes_are_supplied,
    algorithm.advantage_is_supported,
    algorithm.corrections_are_possible,
    algorithm.teacher_is_usable,
    algorithm.preference_is_the_whole_loss,
    algorithm.penalties_have_their_policy,
    sampling.top_k_is_usable,
    algorithm.reference_engine_is_asked,
    algorithm.gdpo_reads_each_reward,
    algorithm.selections_are_possible,
    algorithm.stopping_is_possible,
    algorithm.dynamic_sampling_has_a_selection,
    algorithm.question_pool_is_unbiased,
    algorithm.bounds_can_be_held,
    algorithm.echo_has_observations,
    algorithm.baseline_rewards_are_per_completion,
    algorithm.roles_have_their_baselines,
    runtime.overlap_is_possible,
    runtime.overlap_settings_have_an_effect,
    algorithm.next_policy_is_read,
    packages_are_installed,
    placement.engines_can_rest,
    placement.engines_can_start,
    placement.weights_reach_servers,
    placement.ranks_compute_the_model,
    train.muon_has_whole_matrices,
    model.models_exist,
    model.tokens_have_rows,
    model.adapters_are_ready,
    model.adapters_can_be_served,
    model.images_can_be_shown,
    placement.models_can_be_split,
    preference.reward_head_is_new,
    critic.critic_fits_the_run,
    model.completions_fit_context,
    data.reward_models_are_ready,
    data.data_files_exist,
    data.agents_are_specified,
    data.agents_can_play,
    data.only_rl_plays,
    data.environment_rewards_have_one,
    data.sources_are_within_bounds,
    data.sources_sample_alike,
    data.sources_learn_from_what_there_is,
    data.an_episode_has_room_for_a_turn,
    values_are_filled_in,
    model.model_can_compute,
    train.warmup_is_given_once,
    rollouts.stored_groups_are_as_configured,
    runtime.trackers_are_ready,
    eval.evaluations_are_configured,
    eval.evaluation_metric_exists,
)
PROOFS = (model.models_are_supported,)  # they import transformers and build small copies
TO_DO = (data.data_files_exist, data.agents_can_play, packages_are_installed, values_are_filled_in)
WARNINGS: Sequence[Check] = (
    eval.evaluation_is_held_out,
    train.warmup_ends,
    sampling.completions_fit_micro_batch,
    data.overlong_penalty_is_reachable,
    data.reward_functions_exist,
    algorithm.prune_rate_is_exact,
    sampling.sampling_masks_are_small,
    runtime.some_tokens_are_older,
    model.weights_resolve_an_update,
    runtime.overlap_is_of_use,
)


def load_recipe(
    recipe: Recipe,
    overrides: Sequence[str] = (),
    *,
    root: type[Root] | None = RunConfig,  # type: ignore[assignment]  # the default of Root
) -> Resolved[Root]:
    """Resolve and check a recipe, and download the demo's model if the recipe names it and it is missing; ConfigError
    has one line for each problem."""
    resolved = resolve(recipe, overrides, root=root)
    require_sound(resolved)
    require_proven(resolved)
    if fetch_demo_model(resolved.get("model.path")):
        require_sound(resolved)
        require_proven(resolved)
    return resolved


def require_sound(resolved: Resolved[Any]) -> None:
    """Raise ConfigError, with one line for each problem, if a check finds any."""
    problems = _problems(resolved, CHECKS)
    if problems:
        raise ConfigError(problems)


def require_proven(resolved: Resolved[Any]) -> None:
    """Raise ConfigError if a model of the recipe is not supported; the proofs take seconds."""
    problems = _problems(resolved, PROOFS)
    if problems:
        raise ConfigError(problems)


def fetch_demo_model(path: str) -> bool:
    """Download the demo's model if `path` is its path and it does not exist yet; True if it did not."""
    if not is_downloadable(path):
        return False

    download_demo_model(Path(path))
    return True


def check(resolved: Resolved[Any]) -> list[Problem]:
    """The problems that would stop the run later."""
    return _problems(resolved, CHECKS) or _problems(resolved, PROOFS)


def warnings(resolved: Resolved[Any]) -> list[Problem]:
    """Problems of settings that run but are seldom intended."""
    return _problems(resolved, WARNINGS)


def to_do(resolved: Resolved[Any]) -> list[Problem]:
    """Problems that stop `train` but are only warnings in `explain`: missing data files and packages, values to fill
    in."""
    return _problems(resolved, TO_DO)


def _problems(resolved: Resolved[Any], checks: Sequence[Check]) -> list[Problem]:
    """The findings of the checks whose parameters are all fields of the config, or `r`."""
    sections = {"r": resolved, **vars(resolved.config)}
    problems = []
    for check in checks:
        names = inspect.signature(check).parameters
        if names.keys() <= sections.keys():
            for finding in check(**{name: sections[name] for name in names}):
                problem = finding if isinstance(finding, Problem) else resolved.problem(*finding)
                problems.append(problem)
    return problems
