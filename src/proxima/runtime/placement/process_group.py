"""Lets the processes of a run that torchrun, srun or Ray has started find one another."""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from proxima.config.resolved import Resolved
from proxima.config.sections import PLACEMENTS
from proxima.config.sections.placement_section import KIND, is_supervised
from proxima.data import FieldError
from proxima.runtime.placement.slurm import slurm_variables
from proxima.runtime.state.folder import RunFolder
from proxima.training.ranks import ALONE, Ranks

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
START = "torchrun --nproc-per-node 2 --no-python proxima train RECIPE placement=torchrun"


def adopt_launcher() -> None:
    """Set the variables of torchrun in a task of `srun`. Called when a command line starts, and when a run starts
    without one."""
    if "SLURM_STEP_NUM_TASKS" in os.environ:
        os.environ.update(slurm_variables(os.environ))


def is_rank() -> bool:
    """True if this process is one of several that a launcher has started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first() -> bool:
    """True if this process reports for the run: it is alone, or rank 0."""
    return not is_rank() or os.environ.get("RANK", "0") == "0"


def places_ranks(config: Any) -> bool:
    """True if this process starts the ranks of the run and is not one of them."""
    return PLACEMENTS.holds(config.placement, "ray") and "RANK" not in os.environ


def check_launch(placement: Any) -> None:
    """Raise FieldError if the placement is for one process and a launcher has started several, or for several and no
    launcher has started them."""
    adopt_launcher()
    if PLACEMENTS.holds(placement, "local"):
        if is_rank():
            started = os.environ["WORLD_SIZE"]
            remedy = "set placement=torchrun"
            raise FieldError(KIND, "local", f"runs one process, but a launcher has started {started}", remedy=remedy)
        return
    if missing := [name for name in NEEDED if name not in os.environ]:
        reason = f"is for a process that a launcher has started, but {missing[0]} is not set"
        raise FieldError(KIND, "torchrun", reason, remedy=f"start it with {START}")
    if PLACEMENTS.holds(placement, "ray") and not is_supervised():
        reason = "starts its ranks itself, and torchrun has started this process"
        raise FieldError(KIND, "ray", reason, remedy="start it without torchrun, or set placement=torchrun")
    if os.environ["WORLD_SIZE"] == "1" and getattr(placement.sharding, "offload", False):
        reason = "needs two ranks or more: one rank trains as one process does"
        raise FieldError("placement.sharding.offload", True, reason, remedy="start more ranks, or leave it out")


def check_before_imports(resolved: Resolved[Any], *, resume: bool, overwrite: bool) -> None:
    """Run the checks that need no library: `check_launch` and, in the first process, `RunFolder.check`."""
    check_launch(resolved.config.placement)
    if is_first() and (folder := resolved.config.folder):
        RunFolder(Path(folder).expanduser()).check(resume=resume, overwrite=overwrite)


def ranks_of(config: Any) -> AbstractContextManager[Ranks]:
    """The ranks of the run, of which this process is one; they form a process group within the block.

    Raises:
        FieldError: as `check_launch`.
        UserError: the ranks do not meet, or do not agree.
        RunEnded: another rank has failed within the block.
    """
    check_launch(config.placement)
    if not is_rank():
        return nullcontext(ALONE)
    from proxima.runtime.placement.meeting import met_ranks

    return met_ranks(config)
