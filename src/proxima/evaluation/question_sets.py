"""The question sets of `proxima eval`, loaded and validated before any weights are read.

An `EvalSuite` is a named set or a recipe's `eval` section. `load_suites` finds its data, lets the rewards check the
reference answers, and builds the prompts; `run_eval` then runs the model on them.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from proxima.data import FieldError, UserError
from proxima.engine.engine_selection import EngineSelection, within_servers
from proxima.engine.protocol import EngineRequirements, Sampling
from proxima.evaluation.group_metrics import check_ks
from proxima.evaluation.held_out import HeldOutSet
from proxima.evaluation.suites import Suite
from proxima.model.chat.template_inputs import clock_notes, current_clock
from proxima.model.pretrained import UnloadedModel, without_progress_bars
from proxima.reward import REWARDS
from proxima.rollout.episodes.worlds import Play, make_worlds
from proxima.rollout.generator import GroupSpec
from proxima.rollout.pattern_checks import AnswerTexts
from proxima.rollout.reward_checks import ReferenceAnswers
from proxima.rollout.sources import (
    played_prompts,
    rows_by_source,
    sampling_by_source,
    sampling_of,
    settings_of,
    worlds_of,
)
from proxima.system.machine import set_compute_threads, usable_cores
from proxima.task import TASKS
from proxima.task.mix import TaskSource, sources_of
from proxima.task.prompts import key_notes
from proxima.task.protocol import Rows


@dataclass(frozen=True, kw_only=True)
class EvalSuite:
    """A set of questions, how they are sampled and how they are scored."""

    name: str  # file name of the completions, and key in the result
    task: Any
    rewards: tuple[Any, ...]
    sampling: Sampling
    samples: int = 1  # answers per question
    limit: int = 0  # the first questions of the data, at most; 0: all
    data: str = ""  # source of the questions, as shown to people
    remedy: str = ""  # shown if the data is missing; empty: the error says enough
    given: bool = False  # the caller named the data: what is wrong with its content has a remedy of its own
    path: str = ""  # of the task in the recipe
    sources: tuple[TaskSource, ...] = ()  # of the task; those of a mix may have their own rewards


@dataclass(frozen=True, kw_only=True)
class LoadedSuite:
    """A suite with its questions, and the engine of the evaluation; `notes` are warnings about data and settings. The
    caller closes the world of the questions."""

    suite: EvalSuite
    questions: HeldOutSet
    engine: EngineSelection  # the same for all suites of the evaluation
    notes: tuple[str, ...] = ()
    images: Any = None  # an `ImageStore`, if the questions show images


NAMED_COLUMNS = "give the file rows with the columns question and answer"


def named_suite(
    suite: Suite,
    *,
    given: Path | None = None,
    data: Path | None = None,
    samples: int = 1,
    limit: int = 0,
    sampling: Mapping[str, Any],
    json_columns: Sequence[str] = (),
) -> EvalSuite:
    """Build a named suite: greedy for one sample, temperature 1 for several, with the suite's `max_tokens`; `sampling`
    overrides these.

    Raises:
        UserError: the data or a package of a reward is missing, or several samples are drawn at temperature 0.
    """
    temperature = 0.0 if samples == 1 else 1.0
    settings = {"temperature": temperature, "max_tokens": suite.max_tokens, **sampling}
    if samples > 1 and settings["temperature"] == 0:
        remedy = "greedy answers are identical; set --temperature 1, or --samples 1"
        raise UserError(f"samples={samples} must be 1 at temperature 0: {remedy}")
    task, place = suite.find(given, data, json_columns)
    remedy = NAMED_COLUMNS
    if given is None:
        remedy = f"{suite.remedy}, or name a file: --task {suite.name}=PATH"
    return EvalSuite(
        name=suite.name,
        task=task,
        sources=tuple(sources_of(task, "")),
        rewards=(REWARDS[suite.reward](),),
        sampling=Sampling(**settings),
        samples=samples,
        limit=limit,
        data=place,
        remedy=remedy,
        given=given is not None,
    )


def recipe_suites(eval: Any, reward: Sequence[Any]) -> list[EvalSuite]:
    """The suites of a recipe's `eval` section, scored by their own rewards or else the recipe's.

    Raises:
        FieldError: the section has no task.
    """
    if eval.task is None:
        remedy = (
            "name a task, for example eval.task.kind=gsm8k, or --task gsm8k; held-out rows "
            "of SFT, reward models and DPO have no reward, and are measured during the training"
        )
        raise FieldError("eval.task", None, "leaves nothing to evaluate", remedy=remedy)
    suites = [_recipe_suite(path, held_out, reward) for path, held_out in eval.all_sets.items()]
    taken = {suite.name for suite in suites[1:]}
    if suites[0].name in taken:
        suites[0] = replace(suites[0], name="main")
    return suites


def _recipe_suite(path: str, held_out: Any, reward: Sequence[Any]) -> EvalSuite:
    name = held_out.name or TASKS.kind_of(held_out.task).rpartition(":")[2].lower()
    return EvalSuite(
        name=name,  # a file is named after it
        task=held_out.task,
        rewards=tuple(held_out.reward or reward),
        sampling=held_out.sampling,
        samples=held_out.samples,
        limit=held_out.limit,
        data=str(vars(held_out.task).get("path") or name),
        path=f"{path}.task",
        sources=_sources(f"{path}.task", held_out),
    )


def _sources(path: str, held_out: Any) -> tuple[TaskSource, ...]:
    """The sources of a set, whose own rewards those of the set replace."""
    sources = sources_of(held_out.task, path)
    if held_out.reward:
        return tuple(replace(source, reward=(), reward_path="") for source in sources)
    return tuple(sources)


def load_suites(config: Any, suites: Sequence[EvalSuite], ks: Sequence[int] = ()) -> list[LoadedSuite]:
    """Load the data and prompts of all suites; needs the tokenizer, but no weights.

    Args:
        config: an `EvaluateConfig` (importing it here would be circular).
        ks: the k of pass@k and maj@k.

    Raises:
        UserError: a k exceeds the number of samples, data is missing, more answers than `data.max_unreadable` are
            unreadable, no prompt fits the context, or the engine can't be used.
    """
    for suite in suites:
        check_ks(ks, suite.samples)
    set_compute_threads(config.runtime.threads)
    data = [(suite, *_rows(config, suite)) for suite in suites]  # missing data is reported before transformers loads
    with without_progress_bars():
        model = config.model.unloaded([*(suite.task for suite in suites), config.episode])
    if config.model.max_length is None:
        model, shorter = within_servers(model, {"engine": config.engine})
        data[0][2].extend(shorter)
    samplings: list[Sampling] = []  # each once
    for suite in suites:
        for source in suite.sources:
            sampling = sampling_of(source, suite.sampling, evaluates=True)
            if sampling not in samplings:
                samplings.append(sampling)
    needs = EngineRequirements(
        model=model, compute_dtype=config.model.compute_dtype, samplings=tuple(samplings), publishes=True
    )  # no log-probs are read
    engine = EngineSelection(spec=config.engine, needs=needs)
    data[0][2].extend(engine.check())
    stops = set(chain.from_iterable(sampling.stop for sampling in samplings))
    data[0][2].extend(config.data.template_notes(model, data[0][1], tuple(stops)))  # once, for all suites
    loaded: list[LoadedSuite] = []
    for suite, rows, notes in data:
        questions = _questions(config, suite, rows, model)
        played = any(source.played for source in suite.sources)
        texts = AnswerTexts(
            tokenizer=model.tokenizer,
            prompts=() if played else questions.prompts,
            stop=suite.sampling.stop,
            stop_tokens=model.stop_tokens,
        )
        notes += key_notes(suite.name, rows, model.tokenizer, config.data.template_arguments)
        notes += texts.notes(suite.rewards, suite.name)
        entry = LoadedSuite(suite=suite, questions=questions, engine=engine, notes=tuple(notes), images=model.images)
        loaded.append(entry)
    warned = clock_notes(current_clock(), config.data.template_date)
    loaded = [replace(loaded[0], notes=(*loaded[0].notes, *warned)), *loaded[1:]]
    by_path = played_prompts(
        {entry.suite.path: entry.suite.sources for entry in loaded},
        {entry.suite.path: entry.questions.prompts for entry in loaded},
    )
    if not by_path:
        return loaded
    tasks = {path: source.play for path, (source, _) in by_path.items()}
    prompts = {path: asked for path, (_, asked) in by_path.items()}
    own = {path: settings_of(source, config.episode) for path, (source, _) in by_path.items() if source.episode}
    warned = []

    worlds = make_worlds(tasks, prompts, model, replace(Play.of(config), own=own), warned)
    for i, entry in enumerate(loaded):
        of_suite = worlds_of(entry.suite.sources, worlds)
        loaded[i] = replace(entry, questions=replace(entry.questions, worlds=of_suite))
    loaded[0] = replace(loaded[0], notes=(*loaded[0].notes, *warned))
    return loaded


def _rows(config: Any, suite: EvalSuite) -> tuple[Rows, list[str]]:
    """The rows of a suite, and the rewards' warnings about the reference answers."""
    try:
        rows: Rows = suite.task.rows(config.seed)
    except UserError as error:
        if not suite.remedy:
            raise
        names_itself = suite.given and not isinstance(error, FieldError)  # a field of the task is none of the caller's
        remedy = error.remedy if names_itself else suite.remedy
        raise UserError(f"{suite.name}: {' '.join(error.reason.split())}", remedy=remedy) from None
    answers = ReferenceAnswers(name=suite.name, rows=rows, count=min(suite.limit or len(rows), len(rows)))
    if not any(source.reward for source in suite.sources):
        with closing(config.runtime.rewards(suite.rewards, workers=usable_cores())) as rewards:
            return rows, config.data.answer_notes(rewards, [answers], config.seed)
    by_source = rows_by_source(suite.sources, answers)
    notes = list[str]()
    for source in suite.sources:
        if source.name in by_source:
            specs = source.reward or suite.rewards
            with closing(config.runtime.rewards(specs, workers=usable_cores())) as rewards:
                notes += config.data.answer_notes(rewards, [by_source[source.name]], config.seed)
    return rows, notes


def _questions(config: Any, suite: EvalSuite, rows: Rows, model: UnloadedModel) -> HeldOutSet:
    sampling = replace(suite.sampling, max_tokens=min(suite.sampling.max_tokens, model.context - 1))
    of_prompt = sampling_by_source(suite.sources, sampling, evaluates=True)
    groups = GroupSpec(sampling=sampling, completions=suite.samples, seed=config.seed, sampling_by_prompt=of_prompt)
    source = config.data.prompt_source(rows, model, config.seed)
    questions = HeldOutSet.of(source, suite.limit, suite.rewards, groups, suite.name, suite.sources)
    if not questions.prompts:
        fits = f"none of the {questions.count} questions fits a context of {model.context} tokens"
        raise UserError(f"{suite.name}: {fits}; raise model.max_length")
    return questions
