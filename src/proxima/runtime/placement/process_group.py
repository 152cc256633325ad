"""The processes of a run that torchrun, srun or Ray has started: how they find one another."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from proxima.config.sections import PLACEMENTS
from proxima.config.sections.placement_section import is_supervised
from proxima.data import FieldError, within
from proxima.train.ranks import ALONE, Ranks

START = "torchrun --nproc-per-node 2 --no-python proxima train RECIPE placement=torchrun"


def adopt_launcher() -> None:
    """Give a task of `srun` the variables of torchrun. Called at the start of a command line, and of a run that has
    none."""
    os.environ.update(slurm_variables(os.environ))


def is_rank() -> bool:
    """Whether this process is one of several that a launcher has started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first() -> bool:
    """Whether this process speaks for the run."""
    return not is_rank() or os.environ.get("RANK", "0") == "0"


def is_launched() -> bool:
    """Whether torchrun, or srun, has started this process and others, as whoever resumes the run has to do again."""
    return is_rank() and not is_supervised()


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would set, for a task of an `srun` whose script has exported MASTER_ADDR."""
    if "RANK" in environment or "MASTER_ADDR" not in environment or "SLURM_STEP_NUM_TASKS" not in environment:
        return {}
    node = int(environment["SLURM_NODEID"])
    tasks: list[str] = []  # of each node, from "2(x3),1"
    for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):
        number, _, times = part.removesuffix(")").partition("(x")
        tasks += [number] * int(times or 1)
    port = 20_000 + int(environment.get("SLURM_JOB_ID", "0")) % 20_000
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": tasks[node],
        "GROUP_RANK": str(node),
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }


@contextmanager
def ranks_of(config: Any) -> Iterator[Ranks]:
    """The ranks of the run, of which this process is one; a process group as long as the block lasts.

    Raises:
        FieldError: the placement says one process and there are several, or several and no launcher has started them.
        UserError: the ranks do not meet, or do not agree.
        RunEnded: in the block; another rank has failed.
    """
    adopt_launcher()
    placement = config.placement
    if PLACEMENTS.holds(placement, "local"):
        if is_rank():
            started = os.environ["WORLD_SIZE"]
            remedy = "set placement=torchrun"
            raise FieldError(
                "placement", "local", f"is one process, and a launcher has started {started}", remedy=remedy
            )
        yield ALONE
        return
    from proxima.config.sections.ranks_section import RANK_VARIABLES, check_layout

    if missing := [name for name in RANK_VARIABLES[:2] + RANK_VARIABLES[5:] if name not in os.environ]:
        reason = f"is for a process that a launcher has started, and {missing[0]} is not in the environment"
        raise FieldError("placement", "torchrun", reason, remedy=f"start it with {START}")
    if PLACEMENTS.holds(placement, "ray") and not is_supervised():
        reason = "starts its ranks itself, and torchrun has started this process"
        raise FieldError("placement", "ray", reason, remedy="start it without torchrun, or set placement=torchrun")
    if os.environ["WORLD_SIZE"] == "1":
        if getattr(placement.sharding, "offload", False):
            reason = "needs two ranks or more: one rank trains as one process does"
            raise FieldError("placement.sharding.offload", True, reason, remedy="start more ranks, or leave it out")
        yield ALONE
        return
    with within("placement"):
        check_layout(placement, int(os.environ["WORLD_SIZE"]))
    from proxima.runtime.placement.meeting import first_rank, other_rank

    members = first_rank(config) if os.environ["RANK"] == "0" else other_rank(config)
    with members as ranks:
        yield ranks
