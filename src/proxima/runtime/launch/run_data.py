"""The data of a run before its weights are loaded: training prompts, held-out prompts, warnings; and what its models
and engines must meet."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from proxima.config.batch_arithmetic import prompts_and_kept
from proxima.config.outcomes import AUTO, Outcome, tool_format_outcome
from proxima.config.schema import RunConfig
from proxima.config.sections.algorithm import DistillationConfig, asks_routers, check_routed, without_roles
from proxima.config.sections.data import (
    few_questions_note,
    limits_of,
    own_limits,
    sampling_settings,
    sources_in,
    tasks_of,
    text_notes,
)
from proxima.config.sections.eval import EvalSetConfig
from proxima.config.sections.placement import RayPlacement
from proxima.config.sections.sampling import replays_sampling_masks
from proxima.core.advantage.protocol import needs_baseline
from proxima.data import UserError, require, within
from proxima.data.flow import Prompt
from proxima.engine.engine_selection import EngineSelection, within_servers
from proxima.engine.protocol import EngineRequirements, LogProbName, Sampling
from proxima.evaluation.held_out import HeldOutSet
from proxima.model.images.image_store import ImageStore
from proxima.model.pretrained import UnloadedModel, read_auxiliary_model
from proxima.rollout.episodes.worlds import AgentWorld, Play, World, make_worlds
from proxima.rollout.generator import greedy
from proxima.rollout.reward_checks import PROMPTS, ReferenceAnswers, try_rewards
from proxima.rollout.sources import played_prompts, rows_by_source, sampling_by_source, sampling_of, worlds_of
from proxima.runtime.placement.launcher import is_first, placed_engine, starts_later
from proxima.runtime.resume.changes import check_replayed_rewards
from proxima.runtime.state.replay import StoredRollouts, stored_rollouts
from proxima.system.machine import set_compute_threads, usable_cores
from proxima.task.mix import TaskSource, first_of_each, source_of, sources_of
from proxima.task.opening import open_tasks
from proxima.task.overlaps import overlap_notes
from proxima.task.prompts import PromptSource, key_notes
from proxima.task.protocol import MappedRows, Rows

REFERENCE = "algorithm.reference_engine"
TEACHER = "algorithm.distillation.engine"

LENGTH_CHECK = 2000  # rows whose length is checked before the run


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of a run before its weights are loaded; `notes` are warnings about it. In a replay the training
    questions are not read: the source is the other run's rollouts."""

    source: PromptSource | StoredRollouts
    held_out: list[HeldOutSet]
    engines: dict[str, EngineSelection]  # of the run, by their paths in the config
    notes: list[str]
    sources: Sequence[TaskSource] = ()  # of the training task
    worlds: Mapping[str, World | AgentWorld] = field(default_factory=dict)  # of its sources, by `world_path`
    chosen: Sequence[Outcome] = ()  # what `auto` has become by the data and the tokenizer
    images: ImageStore | None = None  # that prompts show

    @property
    def rows(self) -> dict[str, Rows]:
        """The rows of each task, by its name in messages; a replay has no training rows."""
        rows = dict[str, Rows]()
        if isinstance(self.source, PromptSource):
            rows["task"] = self.source.rows
        for held_out in self.held_out:
            name = f"eval.sets {held_out.name}" if held_out.name else "eval.task"
            rows[name] = held_out.rows
        return rows

    def close(self) -> None:
        """Stop the processes that were started for the tasks."""
        close_worlds(self.worlds)
        for held_out in self.held_out:
            close_worlds(held_out.worlds)

    def world_of(self, prompt: Prompt) -> World | AgentWorld | None:
        """What plays a training prompt; None: the engine answers it."""
        return self.worlds.get(source_of(self.sources, prompt.metadata).world_path)


def load_run_data(config: RunConfig) -> RunData:
    """Load and check the training and held-out questions.

    Raises:
        UserError: something is wrong with the model folder, a task or the prompts.
    """
    set_compute_threads(config.runtime.threads)
    run = config.replayed
    if run is None and config.folder:
        run = Path(config.folder)
    model = config.model.unloaded([*tasks_of(config).values(), config.episode], run)
    model, notes = _within_servers(config, model)
    teacher = _checked_teacher(config, model)
    engines = engine_choices(config, model, teacher)
    if is_first():
        notes += _engine_notes(engines, later=starts_later(config.placement))
    scored = list[ScoredRows]()
    tasks = {f"{path}.task": spec.task for path, spec in config.eval.all_sets.items()}
    if config.replayed is None:
        tasks = {"task": config.task} | tasks
    sources = {path: sources_of(task, path) for path, task in tasks.items()}
    rows_of = open_tasks(tasks, config.seed)
    notes += overlap_notes(tasks, rows_of, limits_of(config))
    source: PromptSource | StoredRollouts
    prompts = dict[str, Sequence[Prompt]]()
    if config.replayed is not None:
        routes = config.algorithm.routing_replay == "rollout"
        source = stored_rollouts(config.replayed, config.train.steps, model, routes=routes)
        if config.eval.task is not None:
            check_replayed_rewards(source.inputs, config.reward, str(config.rollouts))
    else:
        rows = rows_of["task"]
        source = _training_prompts(config, rows, model, notes)
        trials = trial_prompts(source)
        prompts["task"] = trials
        notes += text_notes(config, model, trials)
        answers = ReferenceAnswers(name="task", rows=rows, count=len(rows))
        scored += scored_rows(sources["task"], config.reward, answers, trials)
    sets = dict[str, HeldOutSet]()
    for path, spec in config.eval.all_sets.items():
        place = f"{path}.task"
        held_out = _held_out_set(config, spec, rows_of[place], place, sources[place], model, notes)
        sets[place] = held_out
        prompts[place] = held_out.prompts
        answers = ReferenceAnswers(name=place, rows=held_out.rows, count=held_out.count)
        rewards = spec.reward or config.reward
        scored += scored_rows(held_out.sources, rewards, answers, held_out.prompts)
    notes += _check_rewards(config, scored, model.tokenizer)
    worlds = _worlds(config, sources, prompts, model, notes)
    chosen = []
    if config.episode.tool_format == AUTO and any(each.tool_format for each in worlds.values()):
        chosen.append(tool_format_outcome(model.tokenizer, config.data.template_arguments))
    return RunData(
        source=source,
        held_out=[replace(each, worlds=worlds_of(sources[place], worlds)) for place, each in sets.items()],
        engines=engines,
        notes=list(dict.fromkeys(notes)),  # rewards and environments may have the same
        sources=sources.get("task", ()),
        worlds=worlds_of(sources.get("task", ()), worlds),
        images=model.images,
        chosen=chosen,
    )


def _training_prompts(config: RunConfig, rows: Rows, model: UnloadedModel, notes: list[str]) -> PromptSource:
    """The prompts that the run trains on; `notes` receives warnings."""
    data = config.data
    notes += data.template_notes(model, rows, config.sampling.stop)
    pool = config.algorithm.question_pool
    source = data.prompt_source(rows, model, config.seed, shuffle=data.shuffle, pool=pool)
    notes += _too_long(source)
    notes += key_notes("task", rows, model.tokenizer, data.template_arguments)
    notes += _few_questions(config, rows)
    return source


def _held_out_set(
    config: RunConfig,
    spec: EvalSetConfig,
    rows: Rows,
    place: str,
    sources: Sequence[TaskSource],
    model: UnloadedModel,
    notes: list[str],
) -> HeldOutSet:
    """A held-out set, whose task is at `place` in the config; `notes` receives warnings."""
    questions = config.data.prompt_source(rows, model, config.seed)
    notes += _too_long(questions)
    notes += key_notes(place, rows, model.tokenizer, config.data.template_arguments)
    if spec.reward:  # in place of those of its sources
        sources = [replace(source, reward=(), reward_path="") for source in sources]
    groups = spec.groups(config.seed)
    sampled = sampling_by_source(sources, groups.sampling, evaluates=True)
    groups = replace(groups, sampling_by_prompt=sampled)
    return HeldOutSet.of(questions, spec.limit, spec.reward, groups, spec.name, sources)


def close_worlds(worlds: Mapping[str, World | AgentWorld]) -> None:
    """Stop the processes that were started for tasks."""
    for world in worlds.values():
        world.close()


def _worlds(
    config: RunConfig,
    sources: Mapping[str, Sequence[TaskSource]],
    prompts: Mapping[str, Sequence[Prompt]],
    model: UnloadedModel,
    notes: list[str],
) -> dict[str, World | AgentWorld]:
    """What plays the tasks that are played, by their paths; `notes` receives warnings."""
    played = played_prompts(sources, prompts)
    if not played:
        return {}
    play = replace(Play.of(config), own=own_limits(config))
    of_paths = {path: source.play for path, (source, _) in played.items()}
    asked = {path: of_source for path, (_, of_source) in played.items()}
    worlds = make_worlds(of_paths, asked, model, play, notes)
    world = worlds.get("task")
    if not isinstance(world, AgentWorld):
        return worlds
    try:
        if world.roles:  # those of a class of the user's are known only now
            for error in without_roles(config.algorithm):
                raise error
        if is_first():
            with within("task"):
                world.listen()
    except BaseException:
        close_worlds(worlds)
        raise
    return worlds


def _few_questions(config: RunConfig, rows: Rows) -> list[str]:
    """A warning if a step has more prompts than the task has rows."""
    train = config.train
    prompts, _ = prompts_and_kept(train.prompts_per_step, train.completions_per_prompt, config.algorithm.selection)
    return few_questions_note(prompts, len(rows))


@dataclass(frozen=True, kw_only=True)
class ScoredRows:
    """Rows and the rewards that will score their completions; the prompts are those of a trial. Where nothing learns
    from the rewards, they are only `measured`."""

    rewards: Sequence[Any]
    answers: ReferenceAnswers
    prompts: Sequence[Prompt]
    measured: bool = False


def scored_rows(
    sources: Sequence[TaskSource], rewards: Sequence[Any], answers: ReferenceAnswers, prompts: Sequence[Prompt]
) -> list[ScoredRows]:
    """The rows of a task by the rewards that score them: `rewards`, or those of the source of a row."""
    if not any(source.reward for source in sources):
        return [ScoredRows(rewards=rewards, answers=answers, prompts=prompts[:PROMPTS])]
    by_source = rows_by_source(sources, answers)
    parts = []
    for source in sources:
        own = by_source.get(source.name)
        if own is not None:
            of_source = [prompt for prompt in prompts if source.holds(prompt.metadata)]
            scorers = source.reward or rewards
            measured = source.learns_from == "teacher"
            parts.append(ScoredRows(rewards=scorers, answers=own, prompts=of_source[:PROMPTS], measured=measured))
    return parts


def _check_rewards(config: RunConfig, scored: Sequence[ScoredRows], tokenizer: Any) -> list[str]:
    """Check all rewards with all answers that they will read, then try each list of rewards; returns warnings."""
    notes = list[str]()
    several = dict[int, list[ScoredRows]]()
    for rows in scored:
        several.setdefault(id(rows.rewards), []).append(rows)
    for same in several.values():
        with closing(config.runtime.rewards(same[0].rewards, workers=usable_cores())) as rewards:
            notes += config.data.answer_notes(rewards, [rows.answers for rows in same], config.seed)
    trial = config.runtime.reward_trial
    if trial == "off":
        return notes
    may_refuse = trial == "refuse" and config.algorithm.trains_on_rewards
    for same in several.values():
        first = same[0]
        refuses = may_refuse and not all(rows.measured for rows in same)
        notes += try_rewards(first.rewards, first.prompts, tokenizer, config.runtime.rewards, refuses=refuses)
    return notes


def trial_prompts(source: PromptSource) -> list[Prompt]:
    """At most `PROMPTS` prompts of the task, or of each source of a mix: evenly spaced over a task, the first of each
    source."""
    count = len(source.rows)
    rows: Sequence[int] = range(0, count, max(1, count // PROMPTS))[:PROMPTS]
    if isinstance(source.rows, MappedRows) and source.rows.sources is not None:
        rows = first_of_each(source.rows.sources, PROMPTS)
    prompts = [source.prompt(row, uid=row) for row in rows]
    return [prompt for prompt in prompts if prompt is not None]


def _too_long(source: PromptSource) -> list[str]:
    """A warning if prompts leave no room for a token."""
    too_long = source.count_over_length(LENGTH_CHECK)
    if not too_long:
        return []
    return [
        f"{too_long} of {min(LENGTH_CHECK, len(source.rows))} prompts leave no room for a token in a context of "
        f"{source.context} and are skipped; shorten them or raise model.max_length"
    ]


# ---- the models and engines ------------------------------------------------------------------------------------------


def _checked_teacher(config: RunConfig, model: UnloadedModel) -> UnloadedModel | None:
    """Check that critic and teacher suit the policy, and return the teacher; None if there is none."""
    if asks_routers(config.algorithm, config.engine):
        check_routed(config)
    if config.critic is not None:
        config.critic.check_model(model)
    if config.algorithm.distillation is None:
        return None
    return unloaded_teacher(config.algorithm.distillation, model)


def unloaded_teacher(distillation: DistillationConfig, student: UnloadedModel) -> UnloadedModel:
    """The teacher before its weights are loaded; its context is that of the student.

    Raises:
        FieldError: its tokens differ from the student's, or it reads fewer tokens than prompt and completion may
            have together.
    """
    path = distillation.path
    remedy = "use a teacher of the student's family: they are compared token by token"
    with within("algorithm.distillation"):
        teacher = read_auxiliary_model(student, path, None, "path", remedy)
        family = student.config.model_type
        other = teacher.config.model_type
        alike = student.images is None or family == other
        require(alike, "path", path, f"is a {other}, and a {family} is shown images", remedy=remedy)
        for name in ("bos_token_id", "eos_token_id"):
            ours = getattr(student.tokenizer, name, None)
            theirs = getattr(teacher.tokenizer, name, None)
            require(ours == theirs, "path", path, f"has {name}={theirs}, and model.path has {ours}", remedy=remedy)
        bound = f"reads at most {teacher.context} tokens, and prompt and completion may have {student.context}"
        remedy = f"set model.max_length={teacher.context}"
        fits = teacher.context >= student.context or not is_first()  # others don't know what the servers take
        require(fits, "path", path, bound, remedy=remedy)
        top_k = distillation.divergence.top_k
        size = min(student.vocabulary, teacher.vocabulary)
        require(top_k <= size, "divergence.top_k", top_k, f"must be at most the vocabulary, {size}")
    return replace(teacher, context=student.context)


def _within_servers(config: RunConfig, model: UnloadedModel) -> tuple[UnloadedModel, list[str]]:
    """The policy with a context that the running servers take, where `model.max_length` is unset; and warnings. Only
    the first rank asks: it alone makes prompts and completions.

    Raises:
        UserError: the servers leave no room for a prompt.
    """
    if config.model.max_length is not None or not is_first():
        return model, []
    algorithm = config.algorithm
    needs = rollout_needs(config, model)
    specs: dict[str, Any] = {"engine": None, REFERENCE: None, TEACHER: None}
    if needs.samplings and not starts_later(config.placement):
        specs["engine"] = placed_engine(config.engine)
    if algorithm.needs_reference:
        specs[REFERENCE] = algorithm.reference_engine
    if algorithm.distillation is not None:
        specs[TEACHER] = algorithm.distillation.engine
    bounded, notes = within_servers(model, specs)
    longest = max((sampling.max_tokens for sampling in needs.samplings), default=0)
    if notes and longest >= bounded.context:
        reason = f"max_tokens={longest} leaves no room for a prompt: {notes[0]}"
        raise UserError(reason, remedy="lower sampling.max_tokens, or start a longer server")
    return bounded, notes


def engine_choices(
    config: RunConfig, model: UnloadedModel, teacher: UnloadedModel | None
) -> dict[str, EngineSelection]:
    """The engines of the rollouts, the reference and the teacher, if the run has them, each with what it must
    meet, by their paths in the config; `model` is the policy. No engine is queried yet."""
    algorithm = config.algorithm
    temperature = config.sampling.temperature
    rollouts = rollout_needs(config, model)
    choices = list[EngineSelection]()
    if rollouts.samplings:
        choices.append(EngineSelection(spec=placed_engine(config.engine), needs=rollouts))
    reference = algorithm.reference_engine
    if reference is not None and algorithm.needs_reference:
        needs = _scoring(rollouts, "reference", model, temperature)
        choices.append(EngineSelection(spec=reference, needs=needs, path=REFERENCE))
    distillation = algorithm.distillation
    if distillation is not None and distillation.engine is not None:
        assert teacher is not None
        needs = _scoring(rollouts, "teacher", teacher, temperature)
        choices.append(EngineSelection(spec=distillation.engine, needs=needs, path=TEACHER))
    return {choice.path: choice for choice in choices}


def rollout_needs(config: RunConfig, model: UnloadedModel) -> EngineRequirements:
    """Requirements on the engine that generates; `samplings` is empty for a replay without held-out questions."""
    algorithm = config.algorithm
    placement = config.placement
    replayed = config.replayed is not None
    samplings = list[Sampling]()
    if not replayed:
        samplings += [config.sampling, *sampling_settings(config).values()]
        if needs_baseline(algorithm.advantage):
            samplings.append(greedy(config.sampling))
    behavior: frozenset[LogProbName] = frozenset({algorithm.behavior})
    unread: frozenset[LogProbName] = frozenset()
    score_temperatures: tuple[float, ...] = ()
    if algorithm.proximal == "next" and algorithm.next_from == "engine" and not replayed:
        score_temperatures = (config.sampling.temperature,)
    colocated = isinstance(placement, RayPlacement) and placement.colocate
    return EngineRequirements(
        model=model,
        compute_dtype=config.model.compute_dtype,
        training=None if replayed else config.sampling,
        samplings=tuple(dict.fromkeys([*samplings, *_held_out_samplings(config)])),
        log_probs=behavior if algorithm.reads_behavior else unread,
        measured=behavior if algorithm.mismatch.measure else unread,
        publishes=True,
        overlaps=config.runtime.overlaps,
        sleeps=bool(colocated and placement.gpus_per_rank),
        score_temperatures=score_temperatures,
        sampling_mask=replays_sampling_masks(config.sampling, config.algorithm) and not replayed,
        corrected=bool(algorithm.correction),
        adapter_rank=config.model.adapter_rank,
    )


def _held_out_samplings(config: RunConfig) -> list[Sampling]:
    """The sampling of the held-out sets, and with it that of each source of a mix."""
    samplings = [spec.groups(config.seed).sampling for spec in config.eval.all_sets.values()]
    for sources in sources_in(config).values():
        for source in sources:
            samplings += [sampling_of(source, sampling, evaluates=True) for sampling in tuple(samplings)]
    return samplings


def _scoring(rollouts: EngineRequirements, role: str, model: UnloadedModel, temperature: float) -> EngineRequirements:
    """Requirements on an engine that scores with a model whose weights never change."""
    return EngineRequirements(
        model=model,
        role=role,
        score_temperatures=(temperature,),
        sampling_mask=rollouts.sampling_mask,
        compute_dtype=rollouts.compute_dtype,
        corrected=rollouts.corrected,
    )


def _engine_notes(engines: dict[str, EngineSelection], *, later: bool) -> list[str]:
    """Check the engines, without that of the rollouts if it starts `later`; returns warnings."""
    notes = list[str]()
    for path, choice in engines.items():
        if path == "engine" and later:
            continue
        notes += choice.check()
    return notes
