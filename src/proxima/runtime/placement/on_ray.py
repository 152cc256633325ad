"""A training command with `placement: ray`: this process supervises ranks that run the same command."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxima.runtime.state.folder import RunFolder, new_run_folder

if TYPE_CHECKING:
    from proxima.config.resolved import Resolved

RANK = "proxima.cli.main:train_rank"  # the function that each rank calls
LINES = "ranks.log"  # file in the run folder with the lines of all ranks


@dataclass(frozen=True)
class RayEnd:
    """The outcome of a run on Ray: the exit code of its command, and its folder."""

    exit_code: int
    folder: Path


def train_on_ray(
    resolved: "Resolved[Any]", recipe: Any, overrides: Sequence[str], command: str, begin: Mapping[str, bool]
) -> RayEnd:
    """Train a recipe on the ranks of its placement.

    Args:
        resolved: the recipe with its overrides.
        recipe: a path, a name, or a mapping of JSON values.
        begin: further arguments of `train_recipe`.

    Raises:
        UserError: the cluster can't start the ranks, or the servers.
    """
    from proxima.runtime.placement.engine_group import engine_plan
    from proxima.runtime.placement.ray_supervisor import supervise

    config = resolved.config
    folder = new_run_folder(config.folder, resolved.recipe).absolute()  # the same at each start of the ranks
    RunFolder(folder).check(resume=begin["resume"], overwrite=begin["overwrite"])
    texts = [*(text for text in overrides if not text.startswith("folder=")), f"folder={folder}"]
    arguments = {"recipe": recipe, "overrides": texts, "command": command, **begin}
    again = {"resume": True, "overwrite": False}
    engines = engine_plan(config, folder)
    gc.enable()
    code = supervise(RANK, config.placement, arguments, again=again, engines=engines, log=folder / LINES)
    return RayEnd(code, folder)
