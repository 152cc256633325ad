"""The parts of `proxima explain` other than the estimates: the comment of a recipe, its values, and the warnings."""

from typing import Any

from proxima.config.estimate import StepEstimate
from proxima.config.problems import Problem
from proxima.config.resolved import Resolved
from proxima.config.validate import to_do, warnings
from proxima.system.recipe_files import find_recipe


def header_of(resolved: Resolved[Any]) -> str:
    """The comment that the recipe's file begins with: source, published figures, machine, commands; may be empty."""
    if resolved.recipe is None or not (file := find_recipe(resolved.recipe)).is_file():
        return ""
    lines = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            break
        if "yaml-language-server" not in line:
            text = line.removeprefix("#").removeprefix(" ").rstrip()
            lines.append("".join(char for char in text if char.isprintable()))
    return "\n".join(lines).strip("\n")


def config_remarks(resolved: Resolved[Any]) -> list[Problem]:
    """The warnings, and the problems of `to_do`, which are errors for `train` but warnings here."""
    return [*warnings(resolved), *to_do(resolved)]


def as_json(resolved: Resolved[Any]) -> dict[str, Any]:
    """`explain` as data: `header`, `values`, `batch`, `notes` and `warnings`."""
    estimate = StepEstimate(resolved)
    return {
        "header": header_of(resolved),
        "values": [{"path": e.path, "value": e.value, "source": e.source, "help": e.help} for e in resolved.entries],
        "batch": vars(estimate.batch),
        "notes": estimate.notes,
        "warnings": [str(problem) for problem in config_remarks(resolved)],
    }
