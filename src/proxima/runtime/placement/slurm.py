"""A task of Slurm's `srun`, in the terms of torchrun."""

import re
from collections.abc import Mapping


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would set, for a task of an `srun` whose script has exported MASTER_ADDR."""
    if "RANK" in environment or "MASTER_ADDR" not in environment or "SLURM_STEP_NUM_TASKS" not in environment:
        return {}
    node = int(environment["SLURM_NODEID"])
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment["SLURM_STEP_TASKS_PER_NODE"])  # as "2(x3),1"
    tasks = [number for number, times in counts for _ in range(int(times or 1))]  # of each node
    port = 20_000 + int(environment.get("SLURM_JOB_ID", "0")) % 20_000
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": tasks[node],
        "GROUP_RANK": str(node),
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }
