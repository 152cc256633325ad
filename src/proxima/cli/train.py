"""Train a model from a recipe: by reinforcement learning or, if the recipe has one of these sections, on a fixed data
set: `sft` on given answers, `reward_model` a reward model on pairs, `preference` by DPO and its relatives. Everything
that the run writes is in its folder, which is printed first."""

import json
from typing import Annotated

from proxima.cli.parameters import Argument, Overrides, Recipe

RESUME = "resume the run in the folder: %(prog)s runs/mine --resume"
ACCEPT = "with --resume: also with a changed algorithm, rewards and the like; the run records the change"
REPLAY = "train on the stored rollouts of this run, without generating: rollouts=RUN"


def train_recipe(
    recipe: Recipe,
    override: Overrides = (),
    *,
    rollouts: Annotated[str | None, Argument(REPLAY, "RUN")] = None,
    resume: Annotated[bool, Argument(RESUME)] = False,
    accept_changes: Annotated[bool, Argument(ACCEPT)] = False,
    overwrite: Annotated[bool, Argument("delete the run in the folder and start again")] = False,
    quiet: Annotated[bool, Argument("print only the outcome")] = False,
) -> int:
    """Train what the recipe asks for. Returns the exit code.

    Raises:
        UserError: the recipe is wrong.
    """
    from proxima.cli.train_run import train_from_shell

    if rollouts is not None:
        override = [*override, f"rollouts={json.dumps(rollouts)}"]
    return train_from_shell(
        recipe, override, resume=resume, overwrite=overwrite, accept_changes=accept_changes, quiet=quiet
    )


COMMAND = train_recipe
