"""Reads what torchrun, srun or Ray has set in the environment of a run's process: its rank among several, and the
addresses of the engine's servers. The ranks meet in `rendezvous`."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxima.config.resolved import Resolved
from proxima.config.sections import PLACEMENTS
from proxima.config.sections.placement import KIND, RayPlacement, is_supervised
from proxima.data import FieldError
from proxima.runtime.state.folder import RunFolder

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


def check_launch(placement: object) -> None:
    """Raise FieldError if the placement is for one process and a launcher has started several, or for several and no
    launcher has started them."""
    adopt_launcher()
    if PLACEMENTS.holds(placement, "local"):
        if is_rank():
            started = os.environ["WORLD_SIZE"]
            remedy = "set placement=torchrun"
            raise FieldError(KIND, "local", f"runs one process, but a launcher has started {started}", remedy=remedy)
        return
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        reason = f"is for a process that a launcher has started, but {missing[0]} is not set"
        raise FieldError(KIND, "torchrun", reason, remedy=f"start it with {START}")
    if PLACEMENTS.holds(placement, "ray") and not is_supervised():
        reason = "starts its ranks itself, and torchrun has started this process"
        raise FieldError(KIND, "ray", reason, remedy="start it without torchrun, or set placement=torchrun")


def check_before_imports(resolved: Resolved[Any], *, resume: bool, overwrite: bool) -> None:
    """Run the checks that need no library: `check_launch` and, in the first process, `RunFolder.check`."""
    check_launch(resolved.config.placement)
    folder = resolved.config.folder
    if folder and is_first():
        RunFolder(Path(folder).expanduser()).check(resume=resume, overwrite=overwrite)


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would set, for a task of Slurm's `srun` whose script has exported MASTER_ADDR."""
    if "RANK" in environment or "MASTER_ADDR" not in environment or "SLURM_STEP_NUM_TASKS" not in environment:
        return {}
    node = int(environment["SLURM_NODEID"])
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment["SLURM_STEP_TASKS_PER_NODE"])  # as "2(x3),1"
    tasks = list[str]()  # of each node
    for number, times in counts:
        tasks.extend([number] * int(times or 1))
    port = 20_000 + int(environment.get("SLURM_JOB_ID", "0")) % 20_000
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": tasks[node],
        "GROUP_RANK": str(node),
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }


# variables of the ranks: the file with the addresses of the servers, and the key that these want
SERVERS, KEY = "PROXIMA_ENGINE_SERVERS", "PROXIMA_ENGINE_KEY"


def starts_later(placement: object) -> bool:
    """True if the ranks' supervisor has yet to start the servers, so that they can't be asked."""
    return isinstance(placement, RayPlacement) and bool(placement.engines) and SERVERS not in os.environ


def placed_engine(engine: Any) -> Any:
    """The spec of the rollout engine, pointed at the servers that a supervisor has started; unchanged without them. It
    names the supervisor's file of addresses, so that servers may join and leave. If they listen at 127.0.0.1, none is
    on another machine, and none will be."""
    file = os.environ.get(SERVERS)
    if not file or not hasattr(engine, "serve"):
        return engine
    placed = replace(engine, url=file, serve=None, token_env=KEY, allow_remote=True)
    are_here = all("//127.0.0.1:" in url for url in placed.urls)
    return replace(placed, allow_remote=not are_here)
