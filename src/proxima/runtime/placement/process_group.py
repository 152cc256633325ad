"""The processes of a run that torchrun, srun or Ray has started: how they find one another."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from proxima.config.sections import PLACEMENTS
from proxima.data import FieldError
from proxima.train.ranks import ALONE, Ranks

START = "torchrun --nproc-per-node 2 --no-python proxima train RECIPE placement=torchrun"
IDLE = timedelta(days=30)  # that a rank may wait for the next thing to do; the watchdog ends what hangs


def is_rank() -> bool:
    """Whether this process is one of several that a launcher has started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def ranks_of(placement: Any) -> Iterator[Ranks]:
    """The ranks of the run, of which this process is one; a process group as long as the block lasts.

    Raises:
        FieldError: the placement says one process and there are several, or several and no launcher has started them.
    """
    if PLACEMENTS.holds(placement, "local"):
        if is_rank():
            count = os.environ["WORLD_SIZE"]
            remedy = "set placement=torchrun"
            raise FieldError(
                "placement", "local", f"a launcher has started {count} processes of this run", remedy=remedy
            )
        yield ALONE
        return
    from proxima.config.sections.ranks_section import RANK_VARIABLES

    if missing := [name for name in RANK_VARIABLES[:2] + RANK_VARIABLES[5:] if name not in os.environ]:
        reason = f"no launcher has started this process: {missing[0]} is not in its environment"
        raise FieldError("placement", "torchrun", reason, remedy=f"start it with {START}")
    import torch
    import torch.distributed as dist

    from proxima.train.process_ranks import ProcessRanks

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=placement.timeout)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    ranks = ProcessRanks(dist.new_group(backend="gloo", timeout=IDLE))
    try:
        yield ranks
    finally:
        if not ranks.in_call:  # otherwise others may wait in a collective, and this would wait for them
            dist.destroy_process_group()
