"""The memory of a host in closed form: processes, states that wait there, servers that sleep, and a step's columns."""

from proxima_plan.devices import CPU, GIB
from proxima_plan.layout import DeviceLayout
from proxima_plan.memory import WEIGHTS, DeviceMemory
from proxima_plan.model_size import ModelFacts
from proxima_plan.step_load import Load
from proxima_plan.traffic import HALF

PROCESS = 2 * GIB  # of a process with torch and the libraries of a GPU, assumed; of one on a CPU `ON_CPU`
ON_CPU = GIB // 2
TOKEN = 64  # bytes of rank 0 for a token of a step: columns, records and Parquet (benchmarks/rank_zero)


def host_memory(model: ModelFacts, layout: DeviceLayout, memory: DeviceMemory, load: Load, kind: str) -> dict[str, int]:
    """Return the bytes of the host of rank 0 by kind, without those of rewards and tools; on a CPU without what the
    ranks compute with, which is the memory of a device there.

    New weights take none where they go from device to device; a folder has them once in the served dtype, which the
    system may keep in memory.
    """
    ranks = min(layout.ranks, layout.node)
    servers = 0
    if load.generates and not (layout.in_process or layout.elsewhere):
        devices = layout.engines * layout.engine_devices
        here = layout.node if layout.colocated else max(0, layout.node - ranks)
        servers = min(devices, here)
    process = ON_CPU if kind == CPU else PROCESS
    asleep = layout.colocated and not layout.awake and servers > 0
    sleeping = memory.engine.get(WEIGHTS, 0) if asleep else 0  # of each device
    states = (memory.host - sleeping) * ranks
    served = load.generates and not layout.in_process
    way = ""
    if served:
        way = load.engine.way(adapters=False, colocated=layout.colocated, cpu=kind == CPU)
    batch = round(load.sequences * (load.mean + load.prompt) * TOKEN)
    kinds = {
        "processes": process * (ranks + servers),
        "offloaded states": states,
        "sleeping servers": sleeping * servers,
        "files of new weights": HALF * model.parameters * (way == "folder"),
        "the step's completions": batch * (1 + load.lag),
    }
    return {name: size for name, size in kinds.items() if size}
