"""The `data` section; and the checks of what the sections `task`, `reward` and `episode` hold: specs of `proxima.task`
and `proxima.reward`, and the `EpisodeSettings` of `proxima.rollout`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from proxima.config.builder import Builder
from proxima.config.describe import fields_of, setting
from proxima.config.problems import require_at_least
from proxima.config.resolved import Findings, Resolved
from proxima.config.sections.model import ModelConfig, model_problem
from proxima.config.tree import Source, node_of
from proxima.data import FieldError, UserError, require, within
from proxima.data.errors import counted
from proxima.data.flow import Prompt
from proxima.engine.protocol import Sampling
from proxima.environment import ENVIRONMENTS
from proxima.environment.agent_kinds import AGENT_SANDBOXES, AgentKind, agent_class, asked_kind, make_agent
from proxima.environment.interface import require_environment
from proxima.environment.tool_calls import format_of
from proxima.model.chat.template_inputs import require_moment
from proxima.model.files import did_you_mean
from proxima.model.pretrained import UnloadedModel, load_tokenizer
from proxima.reward import REWARDS
from proxima.reward.runner import RewardRunner
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.rollout.pattern_checks import AnswerTexts, call_notes
from proxima.rollout.reward_checks import ReferenceAnswers, validate_answers
from proxima.rollout.sources import sampling_of, settings_of
from proxima.system.user_modules import user_module_file
from proxima.task import TASKS
from proxima.task.file_formats import SUFFIXES
from proxima.task.local_files import prepare_command
from proxima.task.mix import TaskSource, sources_of
from proxima.task.prompts import Cursor, PromptSource
from proxima.task.protocol import Rows, row_sources
from proxima.task.question_pool import PooledQuestions, QuestionPool
from proxima.task.template_traps import template_notes


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """Fields common to all training that reads rows."""

    system: Annotated[str | None, "system prompt put before each row that has none"] = None
    template_arguments: Annotated[
        Mapping[str, Any], "what the chat template reads beside the messages, as {enable_thinking: false} for Qwen3"
    ] = field(default_factory=dict)
    template_date: Annotated[
        str | None,
        "today for the chat template, as 2024-07-26; null: the day of the run's start, if it reads the clock",
    ] = None
    shuffle: Annotated[bool, "shuffle each epoch by the run's seed"] = True

    def __post_init__(self) -> None:
        require_moment(self.template_date)

    def template_notes(self, model: UnloadedModel, rows: Rows, stop_texts: Sequence[str] = ()) -> list[str]:
        """Warnings about what the model's chat template does to the rows; `stop_texts`: at which an answer ends."""
        return template_notes(
            model.tokenizer,
            model.path,
            rows,
            system=self.system,
            arguments=self.template_arguments,
            stops=model.stop_tokens,
            stop_texts=stop_texts,
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig(RowsConfig):
    over_length: Annotated[Literal["skip", "refuse"], "a prompt that leaves no room for one new token"] = "skip"
    check_answers: Annotated[int, "rows, drawn by the seed, whose answers are read before the run; 0: all"] = 10_000
    max_unreadable: Annotated[float, "share of unreadable ones above which the run is refused; 1: never"] = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 0, "check_answers", remedy="0 reads all")
        share = self.max_unreadable
        require(0 <= share <= 1, "max_unreadable", share, "must be a share in [0, 1]", remedy="1 never refuses")

    def answer_notes(self, rewards: RewardRunner, sets: Sequence[ReferenceAnswers], seed: int) -> list[str]:
        """Check the rewards and the answers that they will read; returns warnings, and raises as `validate_answers`."""
        return validate_answers(rewards, sets, limit=self.check_answers, most_unreadable=self.max_unreadable, seed=seed)

    def prompt_source(
        self, rows: Rows, model: UnloadedModel, seed: int, *, shuffle: bool = False, pool: QuestionPool | None = None
    ) -> PromptSource:
        """The prompts of a task, in the order of its rows or, with `shuffle`, in that of the seed; `pool` decides which
        of them are asked."""
        questions = None if pool is None else PooledQuestions(pool, seed, row_sources(rows))
        return PromptSource(
            rows,
            model.tokenizer,
            context=model.context,
            cursor=Cursor(len(rows), seed, shuffle),
            system=self.system,
            template_arguments=self.template_arguments,
            over_length=self.over_length,
            pool=questions,
        )


DATA_SUFFIXES = (*SUFFIXES, ".gz", ".arrow")
WORLD: tuple[Literal["environment"], Literal["tools"]] = ("environment", "tools")


def tasks_of(config: Any) -> dict[str, Any]:
    """The tasks of a config by their dotted paths."""
    tasks = {"task": getattr(config, "task", None)}
    if hasattr(config, "eval"):
        tasks |= {f"{path}.task": held_out.task for path, held_out in config.eval.all_sets.items()}
    return tasks


def sources_in(config: Any) -> dict[str, list[TaskSource]]:
    """The sources of each task of `tasks_of`, those of mixes one by one."""
    return {path: sources_of(task, path) for path, task in tasks_of(config).items()}


def played_in(config: Any) -> dict[str, Any]:
    """What plays the tasks of a config, by the dotted path of the task that says so: a task itself, a source of a mix,
    or the mix whose environment its sources share; tasks that are not played too."""
    return {source.play_path: source.play for source in _all_sources(config)}


def _all_sources(config: Any) -> Iterator[TaskSource]:
    """The sources of all tasks."""
    for sources in sources_in(config).values():
        yield from sources


def sampling_settings(config: Any) -> dict[str, Sampling]:
    """How training completions are sampled, by the dotted path of the section that says so."""
    samplings = {"sampling": config.sampling}
    for source in sources_of(config.task):
        with within(f"{source.place}.sampling"):
            samplings[f"{source.place}.sampling"] = sampling_of(source, config.sampling)
    return {path: each for path, each in samplings.items() if path == "sampling" or each != config.sampling}


def own_limits(config: Any) -> dict[str, EpisodeSettings]:
    """The limits of episodes of the sources that have their own, by the path of what plays them."""
    limits = {}
    for source in _all_sources(config):
        if source.episode:
            with within(f"{source.place}.episode"):
                limits[source.world_path] = settings_of(source, config.episode)
    return limits


def limits_of(config: Any) -> dict[str, int]:
    """The number of rows of each evaluation, 0: all, by the dotted paths of their tasks."""
    return {f"{path}.task": held_out.limit for path, held_out in config.eval.all_sets.items()}


def scorers_of(r: Resolved[Any], reward: Sequence[Any]) -> dict[str, tuple[str, Sequence[Any]]]:
    """The rewards that score the answers to each source of the tasks, by its path, with the dotted path of their
    list."""
    sets = r.get("eval.all_sets") or {}
    own = {f"{path}.task": (f"{path}.reward", held_out.reward) for path, held_out in sets.items() if held_out.reward}
    scorers = dict[str, tuple[str, Sequence[Any]]]()
    for path, sources in sources_in(r.config).items():
        for source in sources:
            if path in own:
                scorers[source.path] = own[path]
            elif source.reward:
                scorers[source.path] = (source.reward_path, source.reward)
            else:
                scorers[source.path] = ("reward", reward)
    return scorers


def world_of(task: Any, part: Literal["environment", "tools"]) -> Any:
    """The environment or the tools of a task; None of one without such a field, as are most."""
    return setting(task, part)


def agent_of(task: Any) -> Mapping[str, Any]:
    """The arguments of a task's agent; empty of a task without one."""
    environment = world_of(task, "environment")
    if isinstance(environment, Mapping) and agent_class(environment.get("kind")):
        return environment
    return {}


def environment_class(task: Any) -> type | None:
    """The class of the kind of a task's environment; None of a task without one, and of `module:Class`, which only a
    worker imports."""
    kind = _environment_kind(task)
    if isinstance(kind, str) and kind in ENVIRONMENTS:
        return ENVIRONMENTS[kind]
    return None


def _environment_kind(task: Any) -> Any:
    """The kind of a task's environment, as it is written: alone, or beside its arguments."""
    given = world_of(task, "environment")
    return given.get("kind") if isinstance(given, Mapping) else given


def text_notes(config: Any, model: UnloadedModel, prompts: Sequence[Prompt]) -> list[str]:
    """Warnings of a run that generates: patterns of rewards that no answer can match, and stop strings that end a turn
    within its tool calls. `prompts` are some of those of the task."""
    if any(source.played for source in sources_of(config.task)):
        prompts = ()  # the text is that of the last turn
    texts = AnswerTexts(
        tokenizer=model.tokenizer, prompts=prompts, stop=config.sampling.stop, stop_tokens=model.stop_tokens
    )
    notes = texts.notes(config.reward)
    for path, spec in config.eval.all_sets.items():
        sampling = spec.groups(config.seed).sampling
        if spec.reward or sampling.stop != config.sampling.stop:
            own = replace(texts, prompts=(), stop=sampling.stop, name=f"{path}.sampling.stop")
            notes += own.notes(spec.reward or config.reward, f"{path}.reward")
    plays = [source.play for source in sources_of(config.task)]
    if config.sampling.stop and any(world_of(play, "tools") or agent_of(play) for play in plays):
        with suppress(UserError):  # said where the world is built
            tool_format = config.episode.tool_format
            if tool_format == "auto":
                tool_format = format_of(model.tokenizer, config.data.template_arguments)
            notes += call_notes(tool_format, config.sampling, "episode")
    return notes


def few_questions_note(prompts: int, rows: int) -> list[str]:
    """A warning if a step has more prompts, with those that `allocate` adds, than the task has rows."""
    if rows >= prompts:
        return []

    what = f"a step has {counted(prompts, 'prompt')}, and the task has only {counted(rows, 'question')}"
    return [f"{what}: it asks some of them several times; lower train.prompts_per_step, or give more rows"]


def role_metric_names(task: Any) -> set[str]:
    """The metrics of an evaluation of a task whose agent declares roles; those of a role that nobody played are
    missing."""
    roles = roles_of(task)
    return {f"reward/{role}" for role in roles} | {f"accuracy/{role}" for role in roles}


def roles_of(task: Any) -> Sequence[str]:
    """The roles that a task's agent declares in the recipe or has by itself, or those of a mix's sources; most have
    none."""
    roles = list[str]()
    for source in sources_of(task):
        roles += _roles_of_agent(source.play)
    return list(dict.fromkeys(roles))


def _roles_of_agent(play: Any) -> Sequence[str]:
    given = agent_of(play)
    roles = given.get("roles")
    if isinstance(roles, list | tuple):
        return roles
    cls: Any = agent_class(given.get("kind"))
    declared = getattr(cls, "roles", ())
    if not isinstance(declared, property):
        return tuple(declared)
    with suppress(FieldError):  # said by `agents_can_play`
        arguments = {name: value for name, value in given.items() if name != "kind"}
        known: Sequence[str] = make_agent(cls, arguments, given["kind"]).roles
        return known
    return ()


def data_files_exist(r: Resolved[Any]) -> Findings:
    """Data files and prepared data that a task names must exist."""
    for slot, task in _tables_of(r.config, replayed=bool(r.get("rollouts"))):
        if task is None:
            continue
        missing = task.missing() if TASKS.holds(task, "prepared") else None
        if missing:
            yield f"{slot}.path", missing
        for name, value in vars(task).items():
            if _names_a_file(value) and not Path(value).expanduser().is_file():
                yield f"{slot}.{name}", f"no such file; {_how_to_get(Path(value).expanduser())}"


def _names_a_file(value: object) -> bool:
    """True for the path of one local data file."""
    return isinstance(value, str) and value.endswith(DATA_SUFFIXES) and "://" not in value and "*" not in value


def _how_to_get(place: Path) -> str:
    """The remedy for a data file that is missing."""
    make = prepare_command(place)
    if make:
        return f"make it: {make}"
    return f"{did_you_mean(place)}give a path relative to the current folder"


def _tables_of(config: Any, *, replayed: bool) -> Iterator[tuple[str, Any]]:
    """The tasks whose rows are read, those of the sources of a mix; a replay reads no training questions."""
    for path, sources in sources_in(config).items():
        if path != "task" or not replayed:
            yield from ((source.path, source.task) for source in sources)


def agents_are_specified(r: Resolved[Any]) -> Findings:
    """An environment must be known, and the fields of an agent, and of its sandbox, have values of their types, within
    their bounds."""
    for path, task in played_in(r.config).items():
        kind = _environment_kind(task)
        try:
            if isinstance(kind, str):
                require_environment(kind)
        except FieldError as error:
            yield f"{path}.environment", f"names {kind!r}, which {error.requirement}"
        yield from _agent(r, path)[1]
        if path != "task" and getattr(environment_class(task), "trains_only", False):
            message = f"names {kind!r}, which plays in training alone"
            yield f"{path}.environment", f"{message}; name another environment there, or none"


def agents_can_play(r: Resolved[Any]) -> Findings:
    """What an agent, or another kind that can be asked, needs must be there, such as the environment of another library
    in its interpreter."""
    for path, task in played_in(r.config).items():
        agent, problems = _agent(r, path)
        if problems:
            continue
        given = world_of(task, "environment")
        arguments = dict(given) if isinstance(given, Mapping) else {"kind": given}
        kind = arguments.pop("kind", None)
        try:
            asked = agent
            if asked is None:
                asked = asked_kind(kind, arguments)
            if hasattr(asked, "check"):
                asked.check()
        except FieldError as error:
            yield f"{path}.environment", str(error)


def _agent(r: Resolved[Any], path: str) -> tuple[AgentKind | None, list[Any]]:
    """A task's agent, None if there is none or if its fields have problems, and these, by the names of the recipe."""
    task = played_in(r.config)[path]
    given = agent_of(task)
    if not given:
        return None, []
    cls: Any = agent_class(given["kind"])
    path = f"{path}.environment"
    builder = Builder(import_code=r.import_code)
    source = Source(r.entry(path).where)
    arguments = {name: value for name, value in given.items() if name != "kind"}
    try:
        own, other_names = cls.read(arguments)
    except FieldError as error:
        return None, [(f"{path}.{error.field}", error.requirement)]
    agent = builder.dataclass(cls, node_of(own, source), path, given["kind"])
    problems = builder.all_problems()
    elsewhere = AGENT_SANDBOXES.elsewhere
    if elsewhere and set(own) - {info.name for info in fields_of(cls)}:
        problems = [replace(each, message=f"{each.message}; {elsewhere}") for each in problems]
    for name, other in other_names.items():
        changed = {f"{path}.{name}": f"{path}.{other}"}
        problems = [replace(each, path=_renamed(each.path, changed)) for each in problems]
    if problems:
        agent = None
    return agent, problems


def _renamed(path: str, names: Mapping[str, str]) -> str:
    for name, other in names.items():
        if path == name or path.startswith(f"{name}."):
            return other + path[len(name) :]
    return path


def only_rl_plays(r: Resolved[Any]) -> Findings:
    """Refuse environments and tools in a run on a fixed data set, which generates nothing."""
    if "episode" in type(r.config).__dataclass_fields__:
        return
    for path, task in played_in(r.config).items():
        for part in WORLD:
            if world_of(task, part):
                yield f"{path}.{part}", "has no effect in a run on a fixed data set; remove it, or use proxima train"


def environment_rewards_have_one(r: Resolved[Any], reward: Sequence[Any]) -> Findings:
    """A reward from an environment needs a task with one: it can't score a single answer."""
    if r.get("episode") is None:
        return
    plays = {source.path: source.play for source in _all_sources(r.config)}
    for path, (place, specs) in scorers_of(r, reward).items():
        for i, spec in enumerate(specs):
            task = plays[path]
            if task is not None and REWARDS.holds(spec, "environment") and not world_of(task, "environment"):
                message = f"takes its score from an environment, and {path} has none"
                yield f"{place}.{i}.kind", f"{message}; set {path}.environment, or name another reward"


def an_episode_has_room_for_a_turn(task: Any, episode: EpisodeSettings, sampling: Sampling) -> Findings:
    """The tokens of an episode must be enough for one turn."""
    for source in sources_of(task):
        try:
            limits = settings_of(source, episode)
            of_turn = sampling_of(source, sampling)
        except FieldError:  # reported by `sources_are_within_bounds`
            continue
        if source.played and limits.tokens is not None and limits.tokens < of_turn.max_tokens:
            place = "episode.tokens"
            if source.name and "tokens" in source.episode:
                place = f"{source.place}.{place}"
            length = "sampling.max_tokens"
            if source.name and "max_tokens" in source.sampling:
                length = f"{source.place}.{length}"
            message = f"is less than one turn may have, {length}={of_turn.max_tokens}"
            yield place, f"{message}; raise it, or lower {length}"


def sources_are_within_bounds(r: Resolved[Any]) -> Findings:
    """The settings of the sources of a mix have the bounds of the sections whose values they replace, and have an
    effect: an evaluation and a run on a fixed data set do not read all of them."""
    generates = r.get("episode") is not None
    for task, sources in sources_in(r.config).items():
        for source in sources:
            settings = [name for name in ("reward", "episode", "sampling", "learns_from") if getattr(source, name)]
            if not generates and settings:
                part = settings[0]
                yield f"{source.place}.{part}", "has no effect in a run on a fixed data set; remove it"
                continue
            if source.episode and not source.played:
                remedy = f"set {source.path}.environment or {source.path}.tools, or remove it"
                yield f"{source.place}.episode", f"limits episodes, and this source has none; {remedy}"
            samples: Any = r.get("sampling") or Sampling()
            for section, of_run, apply in (
                ("sampling", samples, sampling_of),
                ("episode", r.get("episode"), settings_of),
            ):
                try:
                    if getattr(source, section):
                        apply(source, of_run)
                except FieldError as error:
                    yield f"{source.place}.{section}.{error.field}", error.requirement
            if task == "task" and source.sampling.get("temperature") == 0:
                message = "training needs samples, 0 is greedy; set it > 0, evaluation is greedy by default"
                yield f"{source.place}.sampling.temperature", message


def sources_learn_from_what_there_is(r: Resolved[Any], algorithm: Any) -> Findings:
    """A source learns from a teacher that the run has, or from rewards that it trains on; and both have a source."""
    for entry in r.entries:
        evaluates = entry.path.startswith("eval.") and entry.path.endswith(".learns_from")
        derived = entry.source.startswith("as task")  # of a part that is held out
        if evaluates and entry.value is not None and not derived:
            yield entry.path, "has no effect in an evaluation; remove it"
    trained = sources_of(r.config.task)
    taught = [source for source in trained if source.learns_from == "teacher"]
    others = [source for source in trained if source.learns_from != "teacher"]
    of_rewards = [source for source in others if source.learns_from or taught]
    if taught and algorithm.distillation is None:
        message = "is 'teacher', and the run has none; set algorithm.distillation.path, or remove it"
        yield f"{taught[0].place}.learns_from", message
        return
    if of_rewards and not algorithm.trains_on_rewards:
        source = of_rewards[0]
        remedy = "set it to teacher, or name an algorithm.surrogate"
        value = "is 'rewards'" if source.learns_from else "is null, which is rewards beside a teacher"
        yield f"{source.place}.learns_from", f"{value}, and nothing trains on them; {remedy}"
    if of_rewards and not taught:
        message = "is 'rewards', which says something only beside a source that learns from the teacher; remove it"
        yield f"{of_rewards[0].place}.learns_from", message
    if taught and not others and algorithm.trains_on_rewards:
        message = "is 'teacher' in every source, and algorithm.surrogate would train on nothing"
        yield f"{taught[0].place}.learns_from", f"{message}; set algorithm.surrogate=null"
    if taught and others:
        acts = "gives tokens rewards of their own, which a source that learns from the teacher has not"
        off = {"critic": r.get("critic"), "algorithm.reward_kl": algorithm.reward_kl}
        for slot in [slot for slot, value in off.items() if value is not None]:
            yield slot, f"{acts}; set it to null, or remove {taught[0].place}.learns_from"
        if algorithm.advantage.per_token and r.get("critic") is None:
            remedy = f"use another, such as grpo, or remove {taught[0].place}.learns_from"
            yield "algorithm.advantage.kind", f"{acts}; {remedy}"


def sources_sample_alike(task: Any, sampling: Sampling, algorithm: Any) -> Findings:
    """Where the behavior policy is the truncated one, a batch has sampling masks for all tokens or for none."""
    if algorithm.behavior != "sampled":
        return
    for source in sources_of(task):
        with suppress(FieldError):  # reported by `sources_are_within_bounds`
            if sampling_of(source, sampling).truncates != sampling.truncates:
                message = "truncates the distribution for some sources only, and algorithm.behavior=sampled needs all"
                remedy = "truncate in all of them, or set algorithm.behavior=untruncated"
                yield f"{source.place}.sampling", f"{message}; {remedy}"


def reward_models_are_ready(r: Resolved[Any], model: ModelConfig, reward: Sequence[Any]) -> Findings:
    """A reward model must have a scalar head, and the policy's vocabulary if it reads the policy's tokens."""
    for path, spec in _rewards(r, reward):
        if REWARDS.holds(spec, "model"):
            try:
                spec.check()
                if model_problem(model.path) is None:
                    spec.check_vocabulary(load_tokenizer(model.path, model.revision))
            except FieldError as error:
                yield f"{path}.{error.field}", error.requirement


def reward_functions_exist(r: Resolved[Any], reward: Sequence[Any]) -> Findings:
    """Warn of a function whose file is missing: a command that imports it, as `train`, has refused it already."""
    for path, spec in _rewards(r, reward):
        if REWARDS.holds(spec, "function", "function_batch"):
            module = spec.absolute_path.rpartition(":")[0]
            found = Path(module).is_file() if module.endswith(".py") else user_module_file(module)
            if not found:
                yield f"{path}.path", "no such file or module; a path is relative to the current folder"


def _rewards(r: Resolved[Any], reward: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The rewards of the training and of each held-out set, with their paths."""
    for path, rewards in dict(scorers_of(r, reward).values()).items():
        for i, spec in enumerate(rewards):
            yield f"{path}.{i}", spec


def longest_completion(task: Any, sampling: Sampling) -> int:
    """Tokens of the longest completion, or turn, of a task: those of `sampling`, or of the longest source of a mix."""
    return longest_of(sources_of(task), sampling)[0]


def longest_of(sources: Sequence[TaskSource], sampling: Sampling) -> tuple[int, str]:
    """The most tokens that a completion of these sources may have, and the dotted path of the field that says so."""
    limits: list[tuple[int, str]] = []
    for source in sources:
        own = source.sampling.get("max_tokens")
        if own is None:
            limits.append((sampling.max_tokens, "sampling.max_tokens"))
        else:
            limits.append((own, f"{source.place}.sampling.max_tokens"))
    return max(limits)


def overlong_penalty_is_reachable(task: Any, sampling: Sampling, reward: Sequence[Any]) -> Findings:
    """Warn if no completion that a list of rewards scores can become long enough for its penalty."""
    scored: dict[str, list[TaskSource]] = {}
    for source in sources_of(task):
        scored.setdefault(source.reward_path or "reward", []).append(source)
    for place, sources in scored.items():
        longest, field = longest_of(sources, sampling)
        for i, spec in enumerate(sources[0].reward or reward):
            if not REWARDS.holds(spec, "overlong"):
                continue
            free = spec.max_tokens - spec.buffer_tokens
            if free >= longest:
                message = f"the penalty starts after {free} tokens, never reached with {field}={longest}"
                yield f"{place}.{i}.max_tokens", message
