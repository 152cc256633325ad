"""The data of a run before its weights are loaded: training prompts, held-out prompts, and warnings."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from proxima.config.sections.algorithm_section import asks_routers
from proxima.config.sections.episode_section import is_played
from proxima.data import Prompt
from proxima.engine.protocol import EngineRequirements
from proxima.model.pretrained import UnloadedModel
from proxima.rollout.generator import GroupSpec
from proxima.runtime.launch.engine_needs import check_engines, evaluation_sampling, rollout_needs
from proxima.runtime.launch.inputs import check_replayed_rewards
from proxima.runtime.launch.models import unloaded
from proxima.runtime.launch.preflight import ReferenceAnswers, validate_answers
from proxima.runtime.launch.reward_trial import PROMPTS, try_rewards
from proxima.runtime.placement.process_group import is_first
from proxima.task.cursor import Cursor
from proxima.task.prompts import EVAL_UID, PromptSource, template_note
from proxima.task.protocol import Rows, open_tasks

if TYPE_CHECKING:
    from proxima.config.schema import EvaluateConfig, RunConfig
    from proxima.config.sections.eval_section import EvalSetConfig
    from proxima.runtime.launch.episodes import AgentWorld, World
    from proxima.runtime.state.replay import StoredRollouts

LENGTH_CHECK = 2000  # rows whose length is checked before the run


@dataclass(kw_only=True)
class RunData:
    """The data of a run before its weights are loaded; `notes` are warnings about it. In a replay the training
    questions are not read: the source is the other run's rollouts."""

    source: "PromptSource | StoredRollouts"
    held_out: list["HeldOutSet"]
    needs: EngineRequirements  # of the engine that generates
    notes: list[str]
    world: "World | AgentWorld | None" = None  # of the training task

    def close(self) -> None:
        """Stop the processes that were started for the tasks."""
        if any(world is not None for world in (self.world, *(held_out.world for held_out in self.held_out))):
            from proxima.runtime.launch.episodes import close_worlds

            close_worlds([self.world, *(held_out.world for held_out in self.held_out)])

    @property
    def held_out_rows(self) -> dict[str, Rows]:
        """The rows of the held-out sets, keyed by their names in messages."""
        return {
            f"eval.sets {held_out.spec.name}" if held_out.spec.name else "eval.task": held_out.rows
            for held_out in self.held_out
        }


@dataclass(frozen=True, kw_only=True)
class HeldOutSet:
    """A held-out set: its config, all its rows, the prompts that are asked, and how they are answered."""

    spec: "EvalSetConfig"
    rows: Rows
    prompts: list[Prompt]
    groups: GroupSpec
    world: "World | AgentWorld | None" = None


def load_run_data(config: "RunConfig") -> RunData:
    """Load and check the training and held-out questions.

    Raises:
        UserError: something is wrong with the model folder, a task or the prompts.
    """
    torch.set_num_threads(config.runtime.threads or torch.get_num_threads())
    model = unloaded(config.model)
    notes = _check_models(config, model)
    checks, held_out = list[tuple[Any, ReferenceAnswers]](), list[HeldOutSet]()
    trials = dict[int, tuple[Any, list[Prompt]]]()  # by the id of the rewards: these, and the prompts to try them on
    source: PromptSource | StoredRollouts
    tasks = {f"{path}.task": spec.task for path, spec in config.eval.all_sets.items()}
    if config.replayed is None:
        notes += template_note(model.tokenizer, model.path)
        tasks = {"task": config.task} | tasks
    rows_of = open_tasks(tasks, config.seed)
    if config.replayed is not None:
        from proxima.runtime.state.replay import stored_rollouts

        source = stored_rollouts(config, config.replayed, model)
        check_replayed_rewards(config)
    else:
        rows = rows_of["task"]
        source = prompt_source(config, rows, model, shuffle=config.data.shuffle, notes=notes)
        if len(rows) < config.train.prompts_per_step:
            notes.append(
                f"train.prompts_per_step={config.train.prompts_per_step}, and the task has only {len(rows)} questions: "
                "a step asks some of them several times; lower it, or give more rows"
            )
        checks.append((config.reward, ReferenceAnswers(name="task", rows=rows, count=len(rows))))
        trials[id(config.reward)] = config.reward, trial_prompts(source)
    for path, spec in config.eval.all_sets.items():
        rows = rows_of[f"{path}.task"]
        questions = prompt_source(config, rows, model, shuffle=False, notes=notes)
        prompts, count = held_out_prompts(questions, spec.limit)
        sampling = evaluation_sampling(config.sampling, spec)
        groups = GroupSpec(sampling=sampling, completions=spec.samples, seed=config.seed)
        held_out.append(HeldOutSet(spec=spec, rows=rows, prompts=prompts, groups=groups))
        trials.setdefault(id(spec.reward or config.reward), (spec.reward or config.reward, prompts[:PROMPTS]))
        checks.append((spec.reward or config.reward, ReferenceAnswers(name=f"{path}.task", rows=rows, count=count)))
    for reward in {id(reward): reward for reward, _ in checks}.values():
        notes += validate_answers(replace(config, reward=reward), [answers for by, answers in checks if by is reward])
    for reward, tried in trials.values():
        notes += try_rewards(config, reward, tried, model.tokenizer)
    needs = rollout_needs(config, model)
    data = RunData(source=source, held_out=held_out, needs=needs, notes=notes)
    if played := {path: task for path, task in tasks.items() if is_played(task)}:
        from proxima.runtime.launch.episodes import make_worlds

        paths = [f"{path}.task" for path in config.eval.all_sets]
        asked = {path: part.prompts for path, part in zip(paths, held_out, strict=True)}
        asked |= {"task": trial_prompts(source)} if isinstance(source, PromptSource) else {}
        worlds = make_worlds(config, played, asked, model, notes)
        data.world = worlds.get("task")
        data.held_out = [replace(part, world=worlds.get(path)) for path, part in zip(paths, held_out, strict=True)]
    return data


def _check_models(config: "RunConfig", model: UnloadedModel) -> list[str]:
    """Check that critic, teacher and engines suit the policy; returns warnings."""
    if asks_routers(config.algorithm, config.engine):
        from proxima.config.mixtures import check_routed

        check_routed(config)
    if config.critic is not None:
        from proxima.runtime.launch.critic_weights import check_critic_tokens

        check_critic_tokens(config.critic, model)
    if (distillation := config.algorithm.distillation) is not None:
        from proxima.runtime.launch.teacher import check_teacher

        check_teacher(distillation, model)
    return check_engines(config, model) if is_first() else []


def prompt_source(
    config: "RunConfig | EvaluateConfig",
    rows: Rows,
    model: UnloadedModel,
    *,
    shuffle: bool,
    notes: list[str] | None = None,
) -> PromptSource:
    """The prompts of a task in order; `notes`, if given, receives a warning about prompts that are too long."""
    data, cursor = config.data, Cursor(len(rows), config.seed, shuffle)
    source = PromptSource(
        rows,
        model.tokenizer,
        context=model.context,
        cursor=cursor,
        system=data.system,
        template_arguments=data.template_arguments,
        over_length=data.over_length,
    )
    source.check_template()
    if notes is not None and (too_long := source.count_over_length(LENGTH_CHECK)):
        notes.append(
            f"{too_long} of {min(LENGTH_CHECK, len(rows))} prompts leave no room for a token in a context of "
            f"{model.context} and are skipped; shorten them or raise model.max_length"
        )
    return source


def trial_prompts(source: PromptSource) -> list[Prompt]:
    """At most `PROMPTS` prompts, evenly spaced over the task."""
    count = len(source.rows)
    rows = range(0, count, max(1, count // PROMPTS))[:PROMPTS]
    return [prompt for row in rows if (prompt := source.prompt(row, uid=row)) is not None]


def held_out_prompts(source: PromptSource, limit: int) -> tuple[list[Prompt], int]:
    """The prompts of the first `limit` rows (0: all) without those that are too long, and the number of these rows."""
    count = min(limit or len(source.rows), len(source.rows))
    prompts = (source.prompt(row, uid=EVAL_UID + row) for row in range(count))
    return [prompt for prompt in prompts if prompt is not None], count
