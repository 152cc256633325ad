"""Whether a converted recipe resolves, and what of it this version can't run yet."""

from collections.abc import Iterator
from typing import Any

from proxima.config import ConfigError, check, resolve

ELSEWHERE = (
    "model.",
    "task",
    "eval.",
    "data.",
)  # what is on the machine where the recipe will run is not this one's business


def problems_of(recipe: dict[str, Any]) -> Iterator[str]:
    """One line for each thing that stops the recipe; nothing is opened, and paths are not looked at."""
    try:
        resolved = resolve(recipe)
    except ConfigError as error:
        yield from (str(problem).replace(" (mapping)", "") for problem in error.problems)
        return
    for problem in check(resolved):
        if not problem.path.startswith(ELSEWHERE):
            yield str(problem).replace(" (mapping)", "")
