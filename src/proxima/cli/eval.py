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
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from proxima.cli.output import FORMAT, Format, chosen_format, print_json
from proxima.cli.parameters import Argument
from proxima.data import FieldError, UserError
from proxima.system.user_files import FILE

if TYPE_CHECKING:
    from proxima.data.flow import Group
    from proxima.evaluation.eval_run import EvalOutcome

QUESTIONS, SAMPLING, OUTPUT = "questions", "sampling", "output"  # groups of the options in `--help`
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


def evaluate_model(
    model: Annotated[str | None, Argument("hub name, folder, .gguf file, or a run folder")] = None,
    override: Annotated[Sequence[str], Argument(OVERRIDE, "RECIPE key=value", words="*")] = (),
    *,
    task: Annotated[Sequence[str], Argument(TASK, "NAME[=PATH]", words="append", group=QUESTIONS)] = (),
    data: Annotated[Path | None, Argument(DATA, "FOLDER", group=QUESTIONS)] = None,
    json_column: Annotated[Sequence[str], Argument(JSON_COLUMN, "COLUMN", words="append", group=QUESTIONS)] = (),
    limit: Annotated[int | None, Argument("the first N questions of each set", "N", group=QUESTIONS)] = None,
    samples: Annotated[int | None, Argument(SAMPLES, "N", group=SAMPLING)] = None,
    temperature: Annotated[float | None, Argument(TEMPERATURE, "T", group=SAMPLING)] = None,
    top_p: Annotated[float | None, Argument(TOP_P, "P", group=SAMPLING)] = None,
    max_tokens: Annotated[int | None, Argument(MAX_TOKENS, "N", group=SAMPLING)] = None,
    seed: Annotated[int | None, Argument(SEED, group=SAMPLING)] = None,
    checkpoint: Annotated[str, Argument(CHECKPOINT, group=SAMPLING)] = "last",
    k: Annotated[str, Argument(K, "1,4,8", group=OUTPUT)] = "",
    metric: Annotated[str | None, Argument(METRIC, "NAME", group=OUTPUT)] = None,
    out: Annotated[Path | None, Argument(OUT, "FOLDER", group=OUTPUT)] = None,
    overwrite: Annotated[bool, Argument("replace the evaluation in the folder", group=OUTPUT)] = False,
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
    if compare:
        unread: dict[str, object] = {"--task": task, "--data": data, "--json-column": json_column, "--limit": limit}
        unread |= {"--samples": samples, "--temperature": temperature, "--top-p": top_p, "--max-tokens": max_tokens}
        unread |= {"--k": k, "--out": out, "--checkpoint": checkpoint != "last", "--overwrite": overwrite}
        refuse_beside_compare(model, unread)
        return compare_sets(*compare, metric=metric, seed=seed or 0, form=form, show=show)
    if model is None:
        raise UserError("name a model: proxima eval MODEL --task gsm8k, proxima eval RUN, or --compare A B")
    recipe, overrides = _recipe_and_overrides(override)
    words = {"seed": seed, "eval.metric": metric}
    options = {
        "limit": limit,
        "samples": samples,
        "sampling.temperature": temperature,
        "sampling.top_p": top_p,
        "sampling.max_tokens": max_tokens,
    }
    from proxima.api.evaluation import run_evaluation

    outcome = run_evaluation(
        model,
        recipe,
        [*overrides, *(f"{path}={value}" for path, value in words.items() if value is not None)],
        options=options,
        tasks=task,
        data=data,
        json_columns=json_column,
        checkpoint=checkpoint,
        ks=_ks(k),
        folder=out,
        overwrite=overwrite,
        stream=sys.stderr,
    )
    return _print_outcome(outcome, form, show)


def refuse_beside_compare(model: str | None, options: dict[str, object]) -> None:
    """Raise UserError for a model, or an option that was given, of a comparison, which generates nothing."""
    if model is not None:
        raise UserError(f"--compare takes two results and no model; leave {model!r} out")
    if given := [flag for flag, value in options.items() if value not in (None, "", (), [], False)]:
        raise UserError(f"--compare generates nothing and writes nothing; leave {' and '.join(given)} out")


def _print_outcome(outcome: "EvalOutcome", form: Format, show: int) -> None:
    if form == "json":
        return print_result(outcome)
    from proxima.view.eval_tables import result_numbers, results_rows, results_table

    if form != "text":
        from proxima.view.table_formats import table_as

        rows = results_rows(outcome.result, outcome.seconds)
        return print(table_as(form, rows, result_numbers(outcome.result), None), end="")

    shown = [line for groups in outcome.groups.values() for line in _shown(groups[:show])]
    table = results_table(outcome.result, outcome.seconds, sys.stdout)
    print("\n".join([*shown, *([""] if shown else []), table, "", f"written to {outcome.folder}"]))
    return None


def _recipe_and_overrides(words: Sequence[str]) -> tuple[str | None, list[str]]:
    recipes = [word for word in words if "=" not in word and not word.startswith(FILE)]
    if len(recipes) > 1:
        raise UserError(f"expected one recipe, got {' and '.join(recipes)}; write values as key=value")
    return (recipes[0] if recipes else None), [word for word in words if word not in recipes]


def _ks(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")})) if text.strip() else ()
    except ValueError:
        raise UserError(f"--k {text} must be whole numbers with commas between them: --k 1,4,8") from None


def print_result(outcome: "EvalOutcome") -> None:
    """Print the result and every answer as JSON, for programs."""
    answers = {
        name: [_answer(group, i) for group in groups for i in range(len(group.completions))]
        for name, groups in outcome.groups.items()
    }
    print_json({**outcome.result, "seconds": outcome.seconds, "folder": str(outcome.folder), "answers": answers})


def compare_sets(
    first_name: str, second_name: str, *, metric: str | None = None, seed: int = 0, form: Format = "text", show: int = 0
) -> None:
    """Print the paired comparison of two results, each a folder of an evaluation or a run, and up to `show` questions
    of each set that the second lost, and as many that it gained, with both answers.

    Raises:
        UserError: a folder has no result, or neither has the metric.
    """
    from dataclasses import asdict

    from proxima.data.errors import suggestion
    from proxima.data.outcomes import METRIC_ALIASES
    from proxima.evaluation.question_pairs import changed_questions, compare_results, metrics_of
    from proxima.evaluation.results import read_result
    from proxima.view.eval_tables import changed_lines, comparison_rows, comparison_table
    from proxima.view.table_formats import table_as

    names = (first_name, second_name)
    first, second = map(read_result, names)
    if metric is not None:
        metric = METRIC_ALIASES.get(metric, metric)
        if metric not in (measured := metrics_of(first) | metrics_of(second)):
            raise UserError(f"--metric {metric}: neither result has it", remedy=suggestion(metric, measured))
    comparisons = compare_results(first, second, metric=metric, seed=seed)
    changed = [changed_questions(first, second, comparison) for comparison in comparisons if comparison.name != "all"]
    if form != "text":
        suites = {comparison.name: asdict(comparison) for comparison in comparisons}
        for each in changed if show else ():
            suites[each.name] |= {"lost": each.as_json(each.lost[:show]), "gained": each.as_json(each.gained[:show])}
        facts = {"first": first_name, "second": second_name, "suites": suites}
        numbers = [_flat(asdict(comparison)) for comparison in comparisons]
        return print(table_as(form, comparison_rows(comparisons), numbers, facts), end="")
    print(comparison_table(comparisons, names, sys.stdout))
    for each in changed if show else ():
        print("\n" + "\n".join(changed_lines(each, show)))
    for name in first.suites:
        if unlike := first.sampled_unlike(second, name):
            keys = " and ".join(f"`{key}`" for key in unlike)
            print(f"{name}: the two differ in {keys} too (see result.json), so the difference is not the model's alone")


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a comparison by column, those of an interval as `first/value`, `first/low` …"""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        flat |= {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _shown(groups: Sequence["Group"]) -> list[str]:
    from proxima.view.formatting import fixed, printable

    lines = []
    for group in groups:
        for completion, score in zip(group.completions, group.scores, strict=True):
            mark = (
                {True: "right", False: "wrong", None: fixed(score.value, 3)}[score.correct] if score.valid else "failed"
            )
            answers = group.prompt.answer if isinstance(group.prompt.answer, list) else [group.prompt.answer]
            answer = printable(" or ".join(str(right).rpartition("####")[2].strip() for right in answers))
            expected = "" if group.prompt.answer is None else f"  ({answer})"
            lines.append(f"{mark:<6}  {printable(group.prompt.question)}  →  {printable(completion.text)}{expected}")
    return lines


def _answer(group: "Group", index: int) -> dict[str, Any]:
    completion, score = group.completions[index], group.scores[index]
    return {
        "question": group.prompt.question,
        "answer": group.prompt.answer,
        "sample": completion.sample,
        "text": completion.text,
        "correct": score.correct,
        "reward": score.value if score.valid else None,
        "error": score.error,
        "finish_reason": completion.finish_reason,
    }


COMMAND = evaluate_model
