"""Evaluate a model on named sets (--task gsm8k,aime24) or on a recipe's held-out questions, or a run on its own
held-out questions; or compare two results.

proxima eval MODEL --task gsm8k                       # greedy, one answer per question
proxima eval MODEL --task aime24,math500 --samples 8  # mean@8, pass@8, maj@8
proxima eval MODEL quickstart                         # the recipe's held-out questions
proxima eval runs/mine --checkpoint best              # a run on its own held-out questions
proxima eval --compare evals/a evals/b                # is the difference significant?

Figures with intervals, every answer and the settings are written to a folder."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from proxima.cli.parameters import FORMAT, Argument, chosen_format
from proxima.data import FieldError, UserError
from proxima.system.user_files import FILE

QUESTIONS = "questions"  # groups of the options in `--help`
SAMPLING = "sampling"
OUTPUT = "output"
OVERRIDE = "a recipe (a run has its own), and overrides: engine.slots=32, model.max_length=4096"
TASK = "aime24, aime25, aime26, amc23, gsm8k, math500; several with commas between them"
DATA = "folder of the sets, as FOLDER/NAME/test.parquet (default: data)"
JSON_COLUMN = "column of a named set whose texts are JSON, such as a list of right answers; repeatable"
SAMPLES = "completions per question; 1 (default): greedy"
TEMPERATURE = "default: 0 for one sample, 1 for several"
TOP_P = "keep the most probable tokens up to this mass"
MAX_TOKENS = "maximum tokens of a completion (default: the set's)"
SEED = "seed of the samples and the bootstrap (default: 1, or the recipe's)"
CHECKPOINT = "of a run: last, best, or a step (default: last)"
K = "k of pass@k and maj@k (default: powers of two up to --samples)"
METRIC = "what is reported and compared (default: accuracy, or else the mean reward): reward, length, a reward's name"
OUT = "where to write (default: evals/MODEL-TIME)"
SHOW = "print N questions of each set with their answers; with --compare: N that B lost, and N that it gained"
COMPARE = "two folders that this command wrote, or two runs: a paired test; nothing is generated"


@dataclass(frozen=True, kw_only=True)
class EvalArguments:
    """The options of `EvalOptions`."""

    task: Annotated[Sequence[str], Argument(TASK, "NAME[=PATH]", words="append", group=QUESTIONS)] = ()
    data: Annotated[Path | None, Argument(DATA, "FOLDER", group=QUESTIONS)] = None
    json_column: Annotated[Sequence[str], Argument(JSON_COLUMN, "COLUMN", words="append", group=QUESTIONS)] = ()
    limit: Annotated[int | None, Argument("the first N questions of each set", "N", group=QUESTIONS)] = None
    samples: Annotated[int | None, Argument(SAMPLES, "N", group=SAMPLING)] = None
    temperature: Annotated[float | None, Argument(TEMPERATURE, "T", group=SAMPLING)] = None
    top_p: Annotated[float | None, Argument(TOP_P, "P", group=SAMPLING)] = None
    max_tokens: Annotated[int | None, Argument(MAX_TOKENS, "N", group=SAMPLING)] = None
    seed: Annotated[int | None, Argument(SEED, group=SAMPLING)] = None
    checkpoint: Annotated[str, Argument(CHECKPOINT, group=SAMPLING)] = "last"
    k: Annotated[str, Argument(K, "1,4,8", group=OUTPUT)] = ""
    metric: Annotated[str | None, Argument(METRIC, "NAME", group=OUTPUT)] = None
    out: Annotated[Path | None, Argument(OUT, "FOLDER", group=OUTPUT)] = None
    overwrite: Annotated[bool, Argument("replace the evaluation in the folder", group=OUTPUT)] = False

    def refuse_beside_compare(self, model: str | None) -> None:
        """Raise UserError for a model, or an option that is given, of a comparison, which generates nothing."""
        if model is not None:
            raise UserError(f"--compare takes two results and no model; leave {model!r} out")
        values = {name: value for name, value in vars(self).items() if name not in ("metric", "seed")}
        flags = [f"--{name.replace('_', '-')}" for name, value in values.items() if value and value != "last"]
        if flags:
            raise UserError(f"--compare generates nothing and writes nothing; leave {' and '.join(flags)} out")


def evaluate_model(
    model: Annotated[str | None, Argument("hub name, folder, .gguf file, or a run folder")] = None,
    override: Annotated[Sequence[str], Argument(OVERRIDE, "RECIPE key=value", words="*")] = (),
    *,
    arguments: EvalArguments = EvalArguments(),
    show: Annotated[int, Argument(SHOW, "N", group=OUTPUT)] = 0,
    format: Annotated[Literal["text", "json", "csv", "md"], Argument(FORMAT, group=OUTPUT)] = "text",
    as_json: Annotated[bool, Argument("print everything for programs", flag="--json", group=OUTPUT)] = False,
    compare: Annotated[Sequence[str] | None, Argument(COMPARE, ("A", "B"), words=2, group=OUTPUT)] = None,
) -> None:
    """Evaluate a model, write the result to a folder and print it; or compare two results.

    Raises:
        UserError: as for `proxima.evaluate`.
    """
    form = chosen_format(format, as_json)
    if show < 0:
        raise FieldError("--show", show, "must be >= 0")
    from proxima.view import eval_tables

    if compare:
        arguments.refuse_beside_compare(model)
        metric = arguments.metric
        seed = arguments.seed or 0
        text = eval_tables.results_comparison(*compare, metric=metric, seed=seed, form=form, show=show)
        return print(text, end="")
    if model is None:
        raise UserError("name a model: proxima eval MODEL --task gsm8k, proxima eval RUN, or --compare A B")
    recipe, overrides = _recipe_and_overrides(override)
    from proxima.api.evaluation import EvalOptions, run_evaluation

    options = EvalOptions(**{**vars(arguments), "k": _ks(arguments.k)})
    outcome = run_evaluation(model, recipe, overrides, options, stream=sys.stderr)
    return print(eval_tables.outcome_text(outcome, form, show), end="")


def _recipe_and_overrides(words: Sequence[str]) -> tuple[str | None, list[str]]:
    recipes = [word for word in words if "=" not in word and not word.startswith(FILE)]
    if len(recipes) > 1:
        raise UserError(f"expected one recipe, got {' and '.join(recipes)}; write values as key=value")
    recipe = recipes[0] if recipes else None
    return recipe, [word for word in words if word not in recipes]


def _ks(text: str) -> tuple[int, ...]:
    try:
        if text.strip():
            return tuple(sorted({int(part) for part in text.split(",")}))
        return ()
    except ValueError:
        raise UserError(f"--k {text} must be whole numbers with commas between them: --k 1,4,8") from None


COMMAND = evaluate_model
