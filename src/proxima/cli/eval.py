"""Evaluate a model on named sets (--task gsm8k,aime24), on a recipe's held-out questions, or a run on its own; or
compare two results.

proxima eval MODEL --task gsm8k                       # greedy, one answer per question
proxima eval MODEL --task aime24,math500 --samples 8  # mean@8, pass@8, maj@8
proxima eval MODEL quickstart                         # the recipe's held-out questions
proxima eval runs/mine --checkpoint best              # a run on its own held-out questions
proxima eval --compare evals/a evals/b                # is the difference significant?

Figures with intervals, every answer and the settings are written to a folder."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxima.cli.output import print_json
from proxima.data import UserError

if TYPE_CHECKING:
    from proxima.data import Group
    from proxima.runtime.launch.eval_run import EvalOutcome

SAMPLING = "eval.sampling."  # the path of the options of a completion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="hub name, folder, .gguf file, or a run folder")
    words = "a recipe (a run has its own), and overrides: engine.slots=32, model.max_length=4096"
    parser.add_argument("override", nargs="*", default=[], metavar="RECIPE key=value", help=words)
    add = parser.add_argument_group("questions").add_argument
    tasks = "aime24, aime25, amc23, gsm8k, math500; several with commas between them"
    add("--task", action="append", default=[], metavar="NAME[=PATH]", help=tasks)
    data = "folder of the sets, as FOLDER/NAME/test.parquet (default: data)"
    add("--data", type=Path, metavar="FOLDER", help=data)
    add("--limit", dest="eval.limit", type=int, metavar="N", help="the first N questions of each set")
    add = parser.add_argument_group("sampling").add_argument
    add("--samples", dest="eval.samples", type=int, metavar="N", help="completions per question; 1 (default): greedy")
    temperature = "default: 0 for one sample, 1 for several"
    add("--temperature", dest=f"{SAMPLING}temperature", type=float, metavar="T", help=temperature)
    top_p = "keep the most probable tokens up to this mass"
    add("--top-p", dest=f"{SAMPLING}top_p", type=float, metavar="P", help=top_p)
    tokens = "maximum tokens of a completion (default: the set's)"
    add("--max-tokens", dest=f"{SAMPLING}max_tokens", type=int, metavar="N", help=tokens)
    add("--seed", type=int, help="seed of the samples and the bootstrap (default: 1, or the recipe's)")
    add("--checkpoint", default="last", help="of a run: last, best, or a step (default: last)")
    add = parser.add_argument_group("output").add_argument
    add("--k", default="", metavar="1,4,8", help="k of pass@k and maj@k (default: powers of two up to --samples)")
    metric = (
        "what is reported and compared (default: accuracy, or else the mean reward): reward, length, a reward's name"
    )
    add("--metric", dest="eval.metric", metavar="NAME", help=metric)
    add("--out", type=Path, metavar="FOLDER", help="where to write (default: evals/MODEL-TIME)")
    add("--overwrite", action="store_true", help="replace the evaluation in the folder")
    add("--show", type=int, default=0, metavar="N", help="print N questions of each set with their answers")
    add("--json", action="store_true", help="print everything for programs")
    compare = "two folders that this command wrote, or two runs: a paired test; nothing is generated"
    add("--compare", nargs=2, metavar=("A", "B"), help=compare)


def run(arguments: argparse.Namespace) -> int:
    if arguments.compare:
        if arguments.model is not None:
            raise UserError(f"--compare takes two results and no model; leave {arguments.model!r} out")
        metric = vars(arguments)["eval.metric"]
        return compare_sets(*arguments.compare, metric=metric, seed=arguments.seed or 0, as_json=arguments.json)
    if arguments.model is None:
        say = "proxima eval MODEL --task gsm8k, proxima eval RUN, or proxima eval --compare A B"
        raise UserError(f"name a model: {say}")
    recipes = [word for word in arguments.override if "=" not in word]
    if len(recipes) > 1:
        raise UserError(f"expected one recipe, got {' and '.join(recipes)}; write values as key=value")
    options = {key: value for key, value in vars(arguments).items() if key == "seed" or key.startswith("eval.")}
    overrides = [word for word in arguments.override if "=" in word]
    return evaluate_model(
        arguments.model,
        recipes[0] if recipes else None,
        [*overrides, *(f"{key}={value}" for key, value in options.items() if value is not None)],
        tasks=arguments.task,
        data=arguments.data,
        checkpoint=arguments.checkpoint,
        ks=_ks(arguments.k),
        out=arguments.out,
        overwrite=arguments.overwrite,
        show=arguments.show,
        as_json=arguments.json,
    )


def evaluate_model(
    model: str,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    *,
    tasks: Sequence[str] = (),
    data: Path | None = None,
    checkpoint: str = "last",
    ks: Sequence[int] = (),
    out: Path | None = None,
    overwrite: bool = False,
    show: int = 0,
    as_json: bool = False,
) -> int:
    """Evaluate a model, write the result to a folder and print it.

    Args:
        recipe: whose held-out questions are asked; None: those of `tasks`, or the run's own.
        tasks: named sets, NAME or NAME=PATH; `data` is the folder of the sets.
        ks: k of pass@k and maj@k; none: powers of two.
        out: the folder; None: evals/MODEL-TIME.
        show: questions of each set to print with their answers.

    Raises:
        UserError: as `proxima.evaluate`.
    """
    from proxima.api.evaluation import run_evaluation

    done = run_evaluation(
        model,
        recipe,
        overrides,
        tasks=tasks,
        data=data,
        checkpoint=checkpoint,
        ks=ks,
        folder=out,
        overwrite=overwrite,
        stream=sys.stderr,
    )
    if as_json:
        print_result(done)
        return 0
    from proxima.view.eval_tables import results_table

    shown = [line for groups in done.groups.values() for line in _shown(groups[:show])]
    table = results_table(done.result, done.seconds, sys.stdout)
    print("\n".join([*shown, *([""] if shown else []), table, "", f"written to {done.folder}"]))
    return 0


def _ks(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")})) if text.strip() else ()
    except ValueError:
        raise UserError(f"--k {text} must be whole numbers with commas between them: --k 1,4,8") from None


def print_result(done: "EvalOutcome") -> None:
    """Everything, for programs."""
    answers = {
        name: [_answer(group, i) for group in groups for i in range(len(group.completions))]
        for name, groups in done.groups.items()
    }
    print_json({**done.result, "seconds": done.seconds, "folder": str(done.folder), "answers": answers})


def compare_sets(
    first_name: str, second_name: str, *, metric: str | None = None, seed: int = 0, as_json: bool = False
) -> int:
    """Print the paired comparison of two results, each a folder of an evaluation or a run.

    Raises:
        UserError: a folder has no result, or neither has the metric.
    """
    from dataclasses import asdict

    from proxima.config.problems import suggestion
    from proxima.data.outcomes import METRIC_ALIASES
    from proxima.evaluate import compare_results, metrics_of, read_result
    from proxima.view.eval_tables import comparison_table

    names = (first_name, second_name)
    first, second = map(read_result, names)
    if metric is not None:
        metric = METRIC_ALIASES.get(metric, metric)
        if metric not in (measured := metrics_of(first) | metrics_of(second)):
            raise UserError(f"--metric {metric}: neither result has it", remedy=suggestion(metric, measured))
    comparisons = compare_results(first, second, metric=metric, seed=seed)
    if as_json:
        suites = {comparison.name: asdict(comparison) for comparison in comparisons}
        print_json({"first": first_name, "second": second_name, "suites": suites})
        return 0
    print(comparison_table(comparisons, names, sys.stdout))
    for name in first.suites:
        if first.sampled_alike(second, name) is False:
            how = "the two were not sampled alike (see `sampling`, `system` and `template_arguments` in result.json)"
            print(f"{name}: {how}: the difference is of model and settings")
    return 0


def _shown(groups: Sequence["Group"]) -> list[str]:
    from proxima.view.formatting import fixed, printable

    lines = []
    for group in groups:
        for completion, score in zip(group.completions, group.scores, strict=True):
            mark = (
                {True: "right", False: "wrong", None: fixed(score.value, 3)}[score.correct] if score.valid else "failed"
            )
            answer = printable(str(group.prompt.answer).rpartition("####")[2].strip())
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
