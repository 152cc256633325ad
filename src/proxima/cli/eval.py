"""Ask a model the held-out questions of a recipe, or a run those of its own. Nothing is written."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxima.cli.common import OVERRIDE_HELP, print_json

if TYPE_CHECKING:
    from proxima.data import Group


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="hub name, folder, .gguf file, or a run folder")
    words = f"a recipe (a run has its own), and {OVERRIDE_HELP}"
    parser.add_argument("override", nargs="*", default=[], metavar="RECIPE key=value", help=words)
    parser.add_argument("--checkpoint", default="last", help="of a run: last, best, or a step (default: last)")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N questions with their answers")
    parser.add_argument("--json", action="store_true", help="print everything for programs")


def run(arguments: argparse.Namespace) -> int:
    from proxima.config import load

    recipes = [word for word in arguments.override if "=" not in word]
    overrides = [word for word in arguments.override if "=" in word]
    if len(recipes) > 1:
        raise ValueError(f"one recipe, please: {' and '.join(recipes)} were given; values are written key=value")
    model, recipe = arguments.model, recipes[0] if recipes else None
    if (Path(model) / "config.yaml").is_file():
        from proxima.runtime.export import find_checkpoint

        recipe = recipe or model
        model = str(find_checkpoint(model, arguments.checkpoint).model)
    if recipe is None:
        raise ValueError(f"{model} is no run folder, so a recipe must say what to ask: proxima eval {model} recipes/quickstart.yaml")
    resolved = load(recipe, [f"model.path={model}", *overrides])

    from proxima.runtime.answer import evaluate
    from proxima.view import screen

    with resolved.blame():
        record = evaluate(resolved.config, observer=None if arguments.json else screen(sys.stdout))
    groups = record.pop("groups")
    if arguments.json:
        print_json({**record, "answers": [_answer(group, i) for group in groups for i in range(len(group.completions))]})
    else:
        print("\n".join([*_shown(groups[: arguments.show]), _line(record)]))
    return 0


def _line(record: dict[str, Any]) -> str:
    """`accuracy 0.940   188/200   length 3.1   truncated 0.0 %   17 s`."""
    right = "accuracy unknown: no reward says what is right"
    if record["accuracy"] is not None:
        right = f"accuracy {record['accuracy']:.3f}   {record['correct']}/{record['answers']}"
    invalid = f"   {record['invalid']} scores failed" if record["invalid"] else ""
    if record["length/mean"] is None:
        return f"{right}{invalid}   no question fits the context"
    return (
        f"{right}{invalid}   reward {record['reward/mean']:.3f}   length {record['length/mean']:.1f}"
        f"   truncated {100 * record['truncated_fraction']:.1f} %   {record['seconds']:.0f} s"
    )


def _shown(groups: Sequence["Group"]) -> list[str]:
    from proxima.view.numbers import printable

    lines = []
    for group in groups:
        for completion, score in zip(group.completions, group.scores, strict=True):
            mark = {True: "right", False: "wrong", None: "?"}[score.correct] if score.valid else "failed"
            lines.append(f"{mark:<6}  {printable(group.prompt.question)}  →  {printable(completion.text)}  ({group.prompt.answer})")
    return lines


def _answer(group: "Group", index: int) -> dict[str, Any]:
    completion, score = group.completions[index], group.scores[index]
    return {
        "question": group.prompt.question,
        "answer": group.prompt.answer,
        "text": completion.text,
        "correct": score.correct,
        "reward": score.value if score.valid else None,
        "error": score.error,
        "finish_reason": completion.finish_reason,
    }
