"""What a step makes of the devices, for metrics.jsonl."""

import importlib
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Any

import torch

from proxima.config.resolved import Resolved
from proxima.config.sections.placement import RayPlacement
from proxima.model.precision import product_rate
from proxima.training.stack import TrainStack, UpdateResult

COMMANDS = "proxima.commands"  # the group of entry points of other distributions


def device_figures(
    result: UpdateResult, stack: TrainStack, placement: object, tokens: float, seconds: float
) -> dict[str, float]:
    """Return the speed of a step on its devices, and their memory.

        mfu = FLOP of the model in the update / (its seconds · ranks · measured FLOP/s of matrix products)

    Args:
        result: of the policy's update. stack: the policy's.
        placement: of the config. tokens: of which the speed is meant. seconds: of the whole step.
    Returns: `time/update` and `tokens_per_second/device`; `device/flops_per_second`, of the model on a rank, and
        `device/mfu`, where the sizes of the model are known. Empty for a step without an update.
    """
    if not result.seconds:
        return {}
    ranks = stack.ranks.size
    figures = {"time/update": result.seconds}
    if seconds:
        figures["tokens_per_second/device"] = tokens / seconds / (ranks + engine_devices(placement))
    if result.flops:
        rate = result.flops / result.seconds / ranks
        figures["device/flops_per_second"] = rate
        figures["device/mfu"] = rate / product_rate(stack.model.compute_dtype, stack.model.device)
    return figures


def per_second(tokens: float, seconds: float) -> float:
    """Tokens per second of a stage; 0 if it took no time."""
    if not seconds:
        return 0.0
    return tokens / seconds


def memory_figures(result: UpdateResult, planned: int | None) -> dict[str, float]:
    """Return the memory of the devices, in bytes: `device/memory_allocated` and `device/memory_reserved`, the peaks
    since the policy's last update, where torch counts them; `device/memory_planned`, what the plan has for the first,
    if it is `planned`."""
    if result.memory is None:
        return {}
    figures = {"allocated": result.memory.allocated, "reserved": result.memory.reserved, "planned": planned}
    return {f"device/memory_{name}": float(size) for name, size in figures.items() if size is not None}


def planned_memory(resolved: Resolved[Any] | None, device: torch.device) -> int | None:
    """Return the bytes that a plan of the recipe has on a rank's GPU; None without a GPU, without the package
    proxima-plan, or if it has no plan for this recipe."""
    commands = entry_points(group=COMMANDS, name="plan")
    if resolved is None or device.type != "cuda" or not commands:
        return None
    command = next(iter(commands))
    package = command.module.rpartition(".")[0]
    # a forecast is for people: no error of it may end a run
    with suppress(Exception):
        size: int = importlib.import_module(f"{package}.forecast").memory_of_run(resolved, device)
        return size
    return None


def engine_devices(placement: object) -> float:
    """Return how many devices the servers of `placement.engines` have beside those of the ranks."""
    if not isinstance(placement, RayPlacement) or placement.colocate:
        return 0.0
    return placement.engines * (placement.gpus_per_engine or 1.0)
