"""A training command with `placement: ray`: this process supervises, and its ranks are the same command."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proxima.config.sections import PLACEMENTS

RANK = "proxima.cli.train:train_recipe"  # what each rank calls
LINES = "ranks.log"  # in the run folder, the lines of all ranks


def places_ranks(config: Any) -> bool:
    """Whether this process is to start the ranks of the run, being none itself."""
    return PLACEMENTS.holds(config.placement, "ray") and "RANK" not in os.environ


def train_on_ray(
    config: Any,
    folder: Path,
    recipe: Any,
    overrides: Sequence[str],
    *,
    command: str,
    resume: bool,
    overwrite: bool,
    accept_changes: bool,
    quiet: bool,
) -> int:
    """Train a recipe on the ranks of its placement. Returns the exit code of the command.

    Args:
        config: of the recipe and its overrides.
        folder: of the run, the same at each start of the ranks; on every node.
        recipe: a path, a name, or a mapping of JSON values.

    Raises:
        UserError: the cluster can't start the ranks, or the servers.
    """
    from proxima.runtime.placement.engine_group import engine_plan
    from proxima.runtime.placement.ray_supervisor import supervise

    arguments = {
        "recipe": recipe,
        "overrides": [*(text for text in overrides if not text.startswith("folder=")), f"folder={folder}"],
        "command": command,
        "resume": resume,
        "overwrite": overwrite,
        "accept_changes": accept_changes,
        "quiet": quiet,
    }
    again = {"resume": True, "overwrite": False}
    engines = engine_plan(config, folder)
    return supervise(RANK, config.placement, arguments, again=again, engines=engines, log=folder / LINES)
