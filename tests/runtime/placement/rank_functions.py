"""What the ranks of the tests do."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from proxima.data import UserError


def add_up(folder: str, resume: bool = False) -> int:
    """The sum of all ranks over gloo, as a line of rank 0 and a file for each."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    note(folder, sum=total.item(), resume=resume)
    print(f"sum {total.item():g}" if dist.get_rank() == 0 else "follows")
    print("to the error stream", file=sys.stderr)
    dist.destroy_process_group()
    return 0


def wait(folder: str, resume: bool = False, victim: int = -1, code: int = 0) -> int:
    """Rank `victim` ends itself, -9 by a signal, else by a code; all others wait until a resume."""

    rank = int(os.environ["RANK"])
    note(folder, resume=resume)
    if resume:
        print(f"resumed {rank}")
        return 0
    print(f"waits {rank}")
    if rank == victim:
        time.sleep(1)
        if code < 0:
            os.kill(os.getpid(), -code)
        if code == 70:
            raise RuntimeError("a bad day")
        return code
    try:
        time.sleep(300)
    except KeyboardInterrupt:
        print("writes a checkpoint")
        return 130
    return 0


def note(folder: str, **values: Any) -> None:
    """Write a file of this rank with its variables."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "EXTRA")
    record = {name: os.environ.get(name) for name in names} | values | {"pid": os.getpid(), "python": sys.executable}
    Path(folder, f"{os.environ['RANK']}.{os.getpid()}.json").write_text(json.dumps(record))


def refuse(reason: str) -> int:
    raise UserError(reason, remedy="another way")


def interrupted() -> int:
    raise KeyboardInterrupt


if __name__ == "__main__":  # a supervisor: FUNCTION FOLDER FIELDS ARGUMENTS
    from proxima.config.sections.ranks_section import RayPlacement
    from proxima.runtime.placement.ray_supervisor import supervise

    spec = RayPlacement(gpus_per_rank=0, cpus_per_rank=0.5, **json.loads(sys.argv[3]))
    named = f"tests.runtime.placement.rank_functions:{sys.argv[1]}"
    call = {"folder": sys.argv[2], **json.loads(sys.argv[4])}
    sys.exit(supervise(named, spec, call, log=Path(sys.argv[2], "run.log")))
