"""The data of a run before its weights are loaded: training prompts, held-out prompts, and warnings."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from proxima.config.schema import RunConfig
from proxima.config.sections.algorithm_section import asks_routers, check_routed
from proxima.config.sections.data_section import tasks_of
from proxima.data.flow import Prompt
from proxima.engine.choice import EngineChoice
from proxima.evaluation.held_out import HeldOutSet
from proxima.model.images import ImageStore
from proxima.model.pretrained import UnloadedModel
from proxima.rollout.episodes.worlds import AgentWorld, Play, World, make_worlds
from proxima.rollout.reward_checks import PROMPTS, ReferenceAnswers, try_rewards
from proxima.runtime.launch.engine_needs import engine_choices
from proxima.runtime.launch.teacher import unloaded_teacher
from proxima.runtime.placement.launcher import is_first, starts_later
from proxima.runtime.resume.changes import check_replayed_rewards
from proxima.runtime.state.replay import StoredRollouts, stored_rollouts
from proxima.system.machine import usable_cores
from proxima.task.prompts import PromptSource, key_notes
from proxima.task.protocol import is_played, open_tasks

LENGTH_CHECK = 2000  # rows whose length is checked before the run


@dataclass(frozen=True, kw_only=True)
class ScoredRows:
    """Rows and the rewards that will score their completions; the prompts are those of a trial."""

    rewards: Sequence[Any]
    answers: ReferenceAnswers
    prompts: Sequence[Prompt]


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of a run before its weights are loaded; `notes` are warnings about it. In a replay the training
    questions are not read: the source is the other run's rollouts."""

    source: PromptSource | StoredRollouts
    held_out: list[HeldOutSet]
    engines: dict[str, EngineChoice]  # of the run, by their paths in the config
    notes: list[str]
    world: World | AgentWorld | None = None  # of the training task
    images: ImageStore | None = None  # that prompts show

    def close(self) -> None:
        """Stop the processes that were started for the tasks."""
        for world in (self.world, *(held_out.world for held_out in self.held_out)):
            if world is not None:
                world.close()


def load_run_data(config: RunConfig) -> RunData:
    """Load and check the training and held-out questions.

    Raises:
        UserError: something is wrong with the model folder, a task or the prompts.
    """
    torch.set_num_threads(config.runtime.threads or torch.get_num_threads())
    run = config.replayed or (Path(config.folder) if config.folder else None)
    model = config.model.unloaded([*tasks_of(config).values(), config.episode], run)
    teacher = _checked_teacher(config, model)
    engines = engine_choices(config, model, teacher)
    notes = _asked(engines, later=starts_later(config.placement)) if is_first() else []
    held_out, scored = list[HeldOutSet](), list[ScoredRows]()
    source: PromptSource | StoredRollouts
    tasks = {f"{path}.task": spec.task for path, spec in config.eval.all_sets.items()}
    if config.replayed is None:
        tasks = {"task": config.task} | tasks
    rows_of = open_tasks(tasks, config.seed)
    if config.replayed is not None:
        routes = config.algorithm.routing_replay == "rollout"
        source = stored_rollouts(config.replayed, config.train.steps, model, routes=routes)
        if config.eval.task is not None:
            check_replayed_rewards(source.inputs, config.reward, str(config.rollouts))
    else:
        rows = rows_of["task"]
        notes += config.data.template_notes(model, rows, config.sampling.stop)
        source = config.data.prompt_source(rows, model, config.seed, shuffle=config.data.shuffle)
        notes += _too_long(source) + key_notes("task", rows, model.tokenizer, config.data.template_arguments)
        if len(rows) < config.train.prompts_per_step:
            notes.append(
                f"train.prompts_per_step={config.train.prompts_per_step}, and the task has only {len(rows)} questions: "
                "a step asks some of them several times; lower it, or give more rows"
            )
        answers = ReferenceAnswers(name="task", rows=rows, count=len(rows))
        scored.append(ScoredRows(rewards=config.reward, answers=answers, prompts=trial_prompts(source)))
    for path, spec in config.eval.all_sets.items():
        questions = config.data.prompt_source(rows_of[f"{path}.task"], model, config.seed)
        notes += _too_long(questions)
        notes += key_notes(f"{path}.task", rows_of[f"{path}.task"], model.tokenizer, config.data.template_arguments)
        groups = spec.groups(config.seed)
        asked = HeldOutSet.of(questions, spec.limit, spec.reward, groups, spec.name)
        held_out.append(asked)
        answers = ReferenceAnswers(name=f"{path}.task", rows=asked.rows, count=asked.count)
        rewards = spec.reward or config.reward
        scored.append(ScoredRows(rewards=rewards, answers=answers, prompts=asked.prompts[:PROMPTS]))
    notes += _check_rewards(config, scored, model.tokenizer)
    world = None
    if played := {path: task for path, task in tasks.items() if is_played(task)}:
        paths = [f"{path}.task" for path in config.eval.all_sets]
        opened = {path: part.prompts for path, part in zip(paths, held_out, strict=True)}
        opened |= {"task": trial_prompts(source)} if isinstance(source, PromptSource) else {}

        worlds = make_worlds(played, opened, model, Play.of(config), notes)
        world = worlds.get("task")
        held_out = [replace(part, world=worlds.get(path)) for path, part in zip(paths, held_out, strict=True)]
    return RunData(source=source, held_out=held_out, engines=engines, notes=notes, world=world, images=model.images)


def _check_rewards(config: RunConfig, scored: Sequence[ScoredRows], tokenizer: Any) -> list[str]:
    """Check all rewards with all answers that they will read, then try each list of rewards; returns warnings."""
    notes, several = list[str](), dict[int, list[ScoredRows]]()
    for rows in scored:
        several.setdefault(id(rows.rewards), []).append(rows)
    for same in several.values():
        with closing(config.runtime.rewards(same[0].rewards, workers=usable_cores())) as rewards:
            notes += config.data.answer_notes(rewards, [rows.answers for rows in same], config.seed)
    if (trial := config.runtime.reward_trial) == "off":
        return notes
    refuses = trial == "refuse" and config.algorithm.trains_on_rewards
    for first, *_ in several.values():
        notes += try_rewards(first.rewards, first.prompts, tokenizer, config.runtime.rewards, refuses=refuses)
    return notes


def _checked_teacher(config: RunConfig, model: UnloadedModel) -> UnloadedModel | None:
    """Check that critic and teacher suit the policy, and return the teacher; None if there is none."""
    if asks_routers(config.algorithm, config.engine):
        check_routed(config)
    if config.critic is not None:
        config.critic.check_model(model)
    if config.algorithm.distillation is None:
        return None

    return unloaded_teacher(config.algorithm.distillation, model)


def _asked(engines: dict[str, EngineChoice], *, later: bool) -> list[str]:
    """Check the engines, without that of the rollouts if it starts `later`; returns warnings."""
    return [note for path, choice in engines.items() if path != "engine" or not later for note in choice.check()]


def _too_long(source: PromptSource) -> list[str]:
    """A warning if prompts leave no room for a token."""
    if not (too_long := source.count_over_length(LENGTH_CHECK)):
        return []
    return [
        f"{too_long} of {min(LENGTH_CHECK, len(source.rows))} prompts leave no room for a token in a context of "
        f"{source.context} and are skipped; shorten them or raise model.max_length"
    ]


def trial_prompts(source: PromptSource) -> list[Prompt]:
    """At most `PROMPTS` prompts, evenly spaced over the task."""
    count = len(source.rows)
    rows = range(0, count, max(1, count // PROMPTS))[:PROMPTS]
    return [prompt for row in rows if (prompt := source.prompt(row, uid=row)) is not None]
