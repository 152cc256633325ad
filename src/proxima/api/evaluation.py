"""`proxima.evaluate`: an evaluation from Python, and the code that it shares with `proxima eval`."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from proxima.api.python_values import Overrides, expand_user, override_texts, overrides_named, plain
from proxima.api.saved import SavedEvaluation
from proxima.config.outcomes import settled
from proxima.config.problems import one_problem
from proxima.config.resolution import Recipe
from proxima.config.resolved import Resolved
from proxima.config.scalars import for_any_reader
from proxima.config.schema import EvaluateConfig
from proxima.config.sections.model import model_problem, refuse_checkpoint
from proxima.config.tree import COMMAND_LINE
from proxima.config.validate import load_recipe
from proxima.data import UserError
from proxima.evaluation.eval_run import EvalOutcome, asked_in, check_folder, run_eval
from proxima.evaluation.question_sets import EvalSuite, load_suites, named_suite, recipe_suites
from proxima.evaluation.suites import parse_tasks, suite
from proxima.experiments.run_reader import find_runs, refuse_missing_run
from proxima.model.chat.template_inputs import fixed_clock
from proxima.runtime.resume.changes import dtypes_of_run
from proxima.runtime.state.folder import run_of_model
from proxima.runtime.state.kept_answers import KeptAnswers
from proxima.runtime.state.run_checkpoints import find_checkpoint
from proxima.runtime.watch.clock import Clock
from proxima.view.eval_tables import EvalProgress, results_table

# Where key=value may say something that an evaluation of named sets does not have of its own.
SETTABLE = (
    "data.",
    "engine",
    "eval.limit",
    "eval.metric",
    "eval.samples",
    "eval.sampling",
    "model.",
    "runtime.",
    "seed",
)

SAMPLING = "eval.sampling."
TRAINING = ("eval.every", "eval.before", "eval.after", "eval.stop_after")  # what only a training reads


def evaluate(
    model: str | Path,
    recipe: Recipe | None = None,
    overrides: Overrides = (),
    *,
    task: str | Sequence[str] = (),
    data: str | Path | None = None,
    limit: int | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
    json_columns: Sequence[str] = (),
    checkpoint: str | int = "last",
    k: Sequence[int] = (),
    out: str | Path | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> SavedEvaluation:
    """Evaluate a model, as `proxima eval` does, and return the result.

    Proxima's documentation of evaluation explains each number.

    Args:
        model: hub name, folder, .gguf file, or a run folder, whose recipe is then the default.
        recipe: provides the held-out questions, unless `task` names sets.
        overrides: as for `train`: `{"engine.slots": 32}`.
        task: named sets, `"gsm8k,aime24"` or a list; `gsm8k=FOLDER` gives the location of one.
        data: folder of the named sets, as FOLDER/NAME/test.parquet.
        limit, samples, temperature, top_p, max_tokens, seed: as in `proxima eval --help`; None: the default.
        json_columns: columns of the named sets whose texts are JSON, such as a list of right answers in a CSV file.
        checkpoint: which one of a run: `last`, `best`, or a step.
        k: the k of pass@k and maj@k; empty: powers of two up to `samples`, and `samples`.
        out: a new folder for figures and answers; None: evals/MODEL-TIME.
        overwrite: replace the evaluation in the folder.
        quiet: print nothing; otherwise progress and the table.

    Returns: the result, read from the folder.

    Raises:
        UserError: model, data, recipe, an option or the folder can't be used.
    """
    if isinstance(json_columns, str):
        json_columns = (json_columns,)
    options = EvalOptions(
        task=[task] if isinstance(task, str) else list(task),
        data=_user_path(data),
        json_column=tuple(json_columns),
        limit=limit,
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        seed=seed,
        checkpoint=str(checkpoint),
        k=tuple(sorted(set(k))),
        out=_user_path(out),
        overwrite=overwrite,
    )
    stream = None if quiet else sys.stdout
    with overrides_named():
        if recipe is not None:
            recipe = plain(expand_user(recipe))
        texts = override_texts(overrides)
        outcome = run_evaluation(expand_user(str(model)), recipe, texts, options, stream=stream)
    if not quiet:
        print(results_table(outcome.result, outcome.seconds, sys.stdout))
    return SavedEvaluation(outcome.folder)


def _user_path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given).expanduser()


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """The options of `evaluate` and `proxima eval` besides model and recipe; None: the default.

    Args:
        task, data, json_column: the named sets, and where and how to read them; without `task`, the recipe's questions.
        limit, samples, temperature, top_p, max_tokens: for every set of questions.
        k: the k of pass@k and maj@k; empty: powers of two up to `samples`, and `samples`.
        metric: the headline, as `eval.metric`.
        out: the folder to write.
    """

    task: Sequence[str] = ()
    data: Path | None = None
    json_column: Sequence[str] = ()
    limit: int | None = None
    samples: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    checkpoint: str = "last"
    k: Sequence[int] = ()
    metric: str | None = None
    out: Path | None = None
    overwrite: bool = False

    @property
    def of_every_set(self) -> dict[str, Any]:
        """The options for every set of questions that are set, by their path below `eval`."""
        values = {"limit": self.limit, "samples": self.samples}
        values |= {f"sampling.{name}": getattr(self, name) for name in ("temperature", "top_p", "max_tokens")}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def overrides(self) -> list[str]:
        """The options for the whole evaluation that are set, as `key=value` texts."""
        texts = []
        if self.seed is not None:
            texts.append(f"seed={for_any_reader(self.seed)}")
        if self.metric is not None:
            texts.append(f"eval.metric={self.metric}")
        return texts


def run_evaluation(
    model: str, recipe: Recipe | None, overrides: Sequence[str], options: EvalOptions, stream: TextIO | None = None
) -> EvalOutcome:
    """Run an evaluation for `proxima eval` or `evaluate`; progress is written to `stream`. Errors as for `evaluate`."""
    named = bool(options.task)
    if not named and (options.data is not None or options.json_column):
        option = "data" if options.data is not None else "json_columns"
        raise UserError(f"{option} is for named sets", remedy="name them with task, or set eval.task in a recipe")
    path, recipe = _model_and_recipe(model, recipe, options.checkpoint, named=named)
    resolved = _resolve_evaluation(path, recipe, [*overrides, *options.overrides], options.of_every_set, named=named)
    folder = options.out or _evaluation_folder(model)
    check_folder(folder, overwrite=options.overwrite)
    dtypes = dtypes_of_run(resolved.config, run_of_model(model))  # without a run, those of this machine
    config, _ = settled(resolved.config, None, dtypes)
    with resolved.locating(), fixed_clock(config.data.template_date):
        if named:
            questions = _named_suites(resolved, options)
        else:
            questions = recipe_suites(config.eval, config.reward)
        suites = load_suites(config, questions, options.k)
        answers = KeptAnswers(folder, asked_in(config, suites), overwrite=options.overwrite)
        view = None
        if stream is not None:
            view = EvalProgress(stream, show_results=len(suites) > 1)
            view.chosen(dtypes)
        try:
            return run_eval(config, suites, ks=options.k, folder=folder, observer=view, answers=answers)
        finally:
            for suite in suites:
                for world in suite.questions.worlds.values():
                    world.close()
            if view is not None:
                view.close()


def _model_and_recipe(model: str, recipe: Recipe | None, checkpoint: str, *, named: bool) -> tuple[str, Recipe | None]:
    """The path of the model, or of a run's checkpoint, and the recipe if there is one."""
    refuse_missing_run(Path(model))
    if (Path(model) / "sweep.json").is_file():
        raise UserError(
            f"{model} is a sweep, not a run", remedy=f"name one of its runs, such as {find_runs([model])[0]}"
        )
    if (Path(model) / "config.yaml").is_file():
        recipe = recipe or model
        model = str(find_checkpoint(model, checkpoint).model)
    else:
        refuse_checkpoint(model, checkpoint)
    if recipe is None and not named:
        problem = model_problem(model)
        if problem:
            raise one_problem("model", f"{problem}; or the folder of a run", model, "command line")
        say = f"proxima eval {model} --task gsm8k, or proxima eval {model} quickstart"
        raise UserError(f"{model} is not a run folder, so a recipe or --task must name the questions: {say}")
    return model, recipe


def _resolve_evaluation(
    model: str, recipe: Recipe | None, overrides: Sequence[str], options: Mapping[str, Any], *, named: bool
) -> Resolved[EvaluateConfig]:
    """The sections that an evaluation reads, resolved from the recipe; without a recipe, their defaults."""
    for word in overrides:
        key = word.partition("=")[0]
        if named and not word.startswith(SETTABLE):
            reason = f"{key}: --task has its own questions, prompt and rewards"
            raise UserError(reason, remedy="leave it out, or --task, and give a recipe")
        if key.startswith(TRAINING):
            raise UserError(f"{key} says when a training evaluates: it has no effect here", remedy="leave it out")
    path = f"model.path={json.dumps(model, ensure_ascii=False)}"
    # the model is what is evaluated: the adapter that a recipe trains is merged in a run's checkpoint, or not there
    fixed = [path, "model.lora=null"]
    overrides = [*overrides, *(f"eval.{key}={for_any_reader(value)}" for key, value in options.items())]
    said = dict(word.partition("=")[::2] for word in overrides)
    if named and f"{SAMPLING}temperature" not in said and said.get("eval.samples", "1") != "1":
        sampling_of_recipe = load_recipe(recipe or {}, fixed, root=EvaluateConfig).config.eval.sampling
        if sampling_of_recipe is not None and sampling_of_recipe.temperature == 0:  # how a run asks its own questions
            overrides = [*overrides, f"{SAMPLING}temperature=1"]
    resolved = load_recipe(recipe or {}, [*fixed, *overrides], root=EvaluateConfig)
    if named:
        return resolved
    words = []
    for i in range(len(resolved.config.eval.sets)):
        for option, value in options.items():
            key = f"eval.sets.{i}.{option}"
            if key not in said:
                words.append(f"{key}={for_any_reader(value)}")
    if words:
        return load_recipe(recipe or {}, [*fixed, *overrides, *words], root=EvaluateConfig)
    return resolved


def _named_suites(resolved: Resolved[EvaluateConfig], options: EvalOptions) -> list[EvalSuite]:
    """The named sets, sampled according to the overrides; a recipe's evaluation settings don't apply."""
    said = {entry.path: entry.value for entry in resolved.entries if entry.origin == COMMAND_LINE.origin}
    sampling = {path.removeprefix(SAMPLING): value for path, value in said.items() if path.startswith(SAMPLING)}
    if "stop" in sampling:
        sampling["stop"] = tuple(sampling["stop"])
    samples = int(said.get("eval.samples", 1))
    limit = int(said.get("eval.limit", 0))
    return [
        named_suite(
            suite(name),
            given=path,
            data=options.data,
            samples=samples,
            limit=limit,
            sampling=sampling,
            json_columns=options.json_column,
        )
        for name, path in parse_tasks(options.task).items()
    ]


def _evaluation_folder(model: str) -> Path:
    return Path("evals") / f"{Path(model).name or 'model'}-{Clock().stamp()}"
