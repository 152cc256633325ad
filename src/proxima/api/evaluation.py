"""`proxima.evaluate`: an evaluation from Python, and what `proxima eval` shares with it."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from proxima.api.python_values import Overrides, expand_user, override_texts, overrides_named, plain
from proxima.api.saved import SavedEvaluation
from proxima.config.problems import one_problem
from proxima.config.resolution import Recipe
from proxima.config.resolved import Resolved
from proxima.config.scalars import for_any_reader
from proxima.config.schema import EvaluateConfig
from proxima.config.sections.model_section import model_problem, refuse_checkpoint
from proxima.config.tree import COMMAND_LINE
from proxima.config.validate import load_recipe
from proxima.data import UserError
from proxima.evaluation.eval_run import EvalOutcome, check_folder, run_eval
from proxima.evaluation.question_sets import EvalSuite, load_suites, named_suite, recipe_suites
from proxima.evaluation.suites import parse_tasks, suite
from proxima.experiments.run_reader import find_runs, refuse_missing_run
from proxima.model.chat.template import fixed_clock
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

    Proxima's documentation of evaluation says what each number means.

    Args:
        model: hub name, folder, .gguf file, or a run folder, which also provides its recipe.
        recipe: whose held-out questions are asked, where `task` names none.
        overrides: as for `train`: `{"engine.slots": 32}`.
        task: named sets, `"gsm8k,aime24"` or a list; `gsm8k=FOLDER` says where one is.
        data: folder of the named sets, as FOLDER/NAME/test.parquet.
        limit, samples, temperature, top_p, max_tokens, seed: as in `proxima eval --help`; None: the default.
        json_columns: columns of the named sets whose texts are JSON, such as a list of right answers in a CSV file.
        checkpoint: of a run: `last`, `best`, or a step.
        k: of pass@k and maj@k; empty: powers of two up to `samples`.
        out: a new folder for figures and answers; None: evals/MODEL-TIME.
        overwrite: replace the evaluation in the folder.
        quiet: print nothing; otherwise progress and the table.

    Raises:
        UserError: something is wrong with model, data, recipe or folder.
    """
    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    options: dict[str, Any] = {"limit": limit, "samples": samples}
    options |= {f"sampling.{name}": value for name, value in sampling.items()}
    with overrides_named():
        outcome = run_evaluation(
            expand_user(str(model)),
            None if recipe is None else plain(expand_user(recipe)),
            [*override_texts(overrides), *([] if seed is None else [f"seed={for_any_reader(seed)}"])],
            options=options,
            tasks=[task] if isinstance(task, str) else list(task),
            data=None if data is None else Path(data).expanduser(),
            json_columns=(json_columns,) if isinstance(json_columns, str) else tuple(json_columns),
            checkpoint=str(checkpoint),
            ks=tuple(sorted(set(k))),
            folder=None if out is None else Path(out).expanduser(),
            overwrite=overwrite,
            stream=None if quiet else sys.stdout,
        )
    if not quiet:
        print(results_table(outcome.result, outcome.seconds, sys.stdout))
    return SavedEvaluation(outcome.folder)


def run_evaluation(
    model: str,
    recipe: Recipe | None,
    overrides: Sequence[str],
    *,
    options: Mapping[str, Any],
    tasks: Sequence[str] = (),
    data: Path | None = None,
    json_columns: Sequence[str] = (),
    checkpoint: str = "last",
    ks: Sequence[int] = (),
    folder: Path | None = None,
    overwrite: bool = False,
    stream: TextIO | None = None,
) -> EvalOutcome:
    """Run `proxima eval` or `evaluate`.

    Args:
        options: values of `eval` for every set of questions, by their path below it, such as `sampling.top_p`; None:
            not given.
        stream: shows the progress.
    """
    given = model
    if not tasks and (data is not None or json_columns):
        option = "data" if data is not None else "json_columns"
        raise UserError(f"{option} is for named sets", remedy="name them with task, or set eval.task in a recipe")
    model, recipe = _model_and_recipe(model, recipe, checkpoint, named=bool(tasks))
    options = {key: value for key, value in options.items() if value is not None}
    resolved = _resolve_evaluation(model, recipe, overrides, options, named=bool(tasks))

    folder = folder or _evaluation_folder(given)
    check_folder(folder, overwrite=overwrite)
    config = resolved.config
    with resolved.locating(), fixed_clock(config.data.template_date):
        named = _named_suites(resolved, parse_tasks(tasks), data, json_columns) if tasks else None
        suites = load_suites(config, named or recipe_suites(config.eval, config.reward), ks)
        view = None if stream is None else EvalProgress(stream, show_results=len(suites) > 1)
        try:
            return run_eval(config, suites, ks=ks, folder=folder, observer=view)
        finally:
            for suite in suites:
                if (world := suite.questions.world) is not None:
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
        if problem := model_problem(model):
            raise one_problem("model", f"{problem}; or the folder of a run", model, "command line")
        say = f"proxima eval {model} --task gsm8k, or proxima eval {model} quickstart"
        raise UserError(f"{model} is not a run folder, so a recipe or --task must name the questions: {say}")
    return model, recipe


def _resolve_evaluation(
    model: str, recipe: Recipe | None, overrides: Sequence[str], options: Mapping[str, Any], *, named: bool
) -> Resolved[EvaluateConfig]:
    """The sections of the recipe that an evaluation reads; without a recipe their defaults."""
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
    sets = () if named else resolved.config.eval.sets
    own = {f"eval.sets.{i}.{key}": for_any_reader(value) for i in range(len(sets)) for key, value in options.items()}
    words = [f"{key}={value}" for key, value in own.items() if key not in said]
    return load_recipe(recipe or {}, [*fixed, *overrides, *words], root=EvaluateConfig) if words else resolved


def _named_suites(
    resolved: Resolved[EvaluateConfig], tasks: Mapping[str, Path | None], data: Path | None, json_columns: Sequence[str]
) -> list[EvalSuite]:
    """The tasks of named sets, sampled as the overrides say; a recipe's own evaluation settings don't apply."""
    said = {entry.path: entry.value for entry in resolved.entries if entry.origin == COMMAND_LINE.origin}
    sampling = {path.removeprefix(SAMPLING): value for path, value in said.items() if path.startswith(SAMPLING)}
    if "stop" in sampling:
        sampling["stop"] = tuple(sampling["stop"])
    samples, limit = int(said.get("eval.samples", 1)), int(said.get("eval.limit", 0))
    how: Any = {"data": data, "samples": samples, "limit": limit, "sampling": sampling, "json_columns": json_columns}
    return [named_suite(suite(name), given=path, **how) for name, path in tasks.items()]


def _evaluation_folder(model: str) -> Path:
    return Path("evals") / f"{Path(model).name or 'model'}-{Clock().stamp()}"
