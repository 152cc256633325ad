"""Checks that no single field can make: whether the parts of a config fit each other and this machine.

A check is a function from `Resolved` to problems. Those in `CHECKS` stop the run; those in `WARNINGS` are shown. A
check runs where the config of the command has the sections that its line names.
To add one: the function in `algorithm_checks`, `machine_checks` or `schedule_checks`, a line in one of the two tables,
and the case as a user types it in `tests/config/test_check.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, overload

from proxima.config import (
    algorithm_checks,
    async_checks,
    critic_checks,
    engine_checks,
    machine_checks,
    replay_checks,
    sampling_checks,
    schedule_checks,
)
from proxima.config.describe import fields_of
from proxima.config.problems import ConfigError, Problem
from proxima.config.resolve import Recipe, Resolved, resolve
from proxima.config.schema import RunConfig
from proxima.model.demo_model import download_demo_model, is_downloadable

Check = Callable[[Resolved[Any]], Iterator[Problem]]
Root = TypeVar("Root")

ALL_SECTIONS = " ".join(info.name for info in fields_of(RunConfig))
CHECKS: Sequence[tuple[Check, str]] = (
    (sampling_checks.training_samples_at_random, "sampling"),
    (sampling_checks.behavior_matches_sampling, "sampling algorithm engine"),
    (sampling_checks.sampling_masks_are_replayed, "sampling algorithm"),
    (algorithm_checks.groups_have_several_completions, "train algorithm"),
    (algorithm_checks.needed_tensors_are_supplied, "algorithm engine"),
    (algorithm_checks.preference_is_the_whole_loss, "algorithm"),
    (algorithm_checks.epochs_measure_the_kl, "algorithm train"),
    (algorithm_checks.advantage_is_supported, "algorithm critic"),
    (algorithm_checks.teacher_is_usable, "algorithm engine"),
    (engine_checks.reference_engine_is_asked, "algorithm"),
    (algorithm_checks.gdpo_has_the_weights, "algorithm reward"),
    (algorithm_checks.advantage_reads_the_kl, "algorithm"),
    (algorithm_checks.allocation_keeps_batch_size, "algorithm train"),
    (algorithm_checks.dynamic_sampling_has_a_selection, "algorithm"),
    (algorithm_checks.baseline_rewards_are_per_completion, "algorithm reward"),
    (algorithm_checks.selection_metrics_exist, "algorithm reward"),
    (algorithm_checks.correction_has_an_effect, "algorithm"),
    (async_checks.overlap_is_possible, "runtime rollouts algorithm engine"),
    (async_checks.overlap_settings_have_an_effect, "runtime rollouts"),
    (algorithm_checks.next_policy_is_read, "algorithm"),
    (algorithm_checks.next_policy_is_computed, "algorithm rollouts"),
    (machine_checks.model_exists, "model"),
    (machine_checks.adapters_are_ready, "model"),
    (machine_checks.reward_head_is_new, "model reward_model"),
    (critic_checks.critic_model_exists, "critic"),
    (critic_checks.critic_is_read, "critic algorithm"),
    (critic_checks.critic_fits_the_step, "critic train"),
    (machine_checks.completions_fit_context, "model"),
    (machine_checks.reward_models_are_ready, "model reward"),
    (machine_checks.data_files_exist, ""),
    (machine_checks.values_are_filled_in, ""),
    (machine_checks.dtypes_are_consistent, "model"),
    (machine_checks.device_exists, "model"),
    (replay_checks.replay_is_of_another_run, "rollouts"),
    (replay_checks.stored_groups_are_as_configured, ALL_SECTIONS),
    (machine_checks.trackers_are_ready, "monitor"),
    (schedule_checks.evaluations_are_configured, "eval checkpoint"),
    (schedule_checks.evaluation_metric_exists, "eval reward"),
    (schedule_checks.best_metric_has_a_direction, "eval checkpoint reward"),
)
WARNINGS: Sequence[tuple[Check, str]] = (
    (schedule_checks.evaluation_is_held_out, "task eval"),
    (schedule_checks.warmup_ends, "train"),
    (schedule_checks.completions_fit_micro_batch, "sampling train"),
    (schedule_checks.overlong_penalty_is_reachable, "sampling reward"),
    (algorithm_checks.prune_rate_is_exact, "algorithm train"),
    (sampling_checks.sampling_masks_are_small, "sampling algorithm"),
    (sampling_checks.sampling_masks_are_read, "sampling algorithm engine"),
    (algorithm_checks.some_tokens_are_older, "algorithm runtime"),
    (schedule_checks.weights_resolve_an_update, "model train"),
    (async_checks.overlap_is_of_use, "runtime train algorithm engine rollouts"),
)


@overload
def load_recipe(recipe: Recipe, overrides: Sequence[str] = ()) -> Resolved[RunConfig]: ...
@overload
def load_recipe(recipe: Recipe, overrides: Sequence[str] = (), *, root: type[Root]) -> Resolved[Root]: ...
def load_recipe(recipe: Recipe, overrides: Sequence[str] = (), *, root: type = RunConfig) -> Resolved[Any]:
    """`resolve`, then `check`; ConfigError with one line for each problem. Downloads the demo's model where the recipe
    names it and it is missing."""
    with all_problems():
        resolved: Resolved[Any] = resolve(recipe, overrides, root=root)
    if problems := check(resolved):
        raise ConfigError(problems)
    if is_downloadable(path := resolved.config.model.path):
        download_demo_model(Path(path))
    return resolved


@contextmanager
def all_problems() -> Iterator[None]:
    """Add to the ConfigError of a `resolve` what `check` finds in the sections that are whole."""
    try:
        yield
    except ConfigError as error:
        if error.whole is None:
            raise
        raise ConfigError([*error.problems, *check(error.whole)]) from None


def check(resolved: Resolved[Any]) -> list[Problem]:
    """Everything that would stop the run later."""
    return _problems(resolved, CHECKS)


def warnings(resolved: Resolved[Any]) -> list[Problem]:
    """Settings that run but are seldom intended."""
    return _problems(resolved, WARNINGS)


def to_do(resolved: Resolved[Any]) -> list[Problem]:
    """What stops `train`, and is only a warning for a reader: data files that are missing, values to fill in."""
    return [*machine_checks.data_files_exist(resolved), *machine_checks.values_are_filled_in(resolved)]


def _problems(resolved: Resolved[Any], checks: Sequence[tuple[Check, str]]) -> list[Problem]:
    sections = set(vars(resolved.config))
    return [problem for one, needed in checks if sections.issuperset(needed.split()) for problem in one(resolved)]
