"""What a step makes of the devices, for metrics.jsonl."""

from typing import Any

from proxima.config.sections.placement_section import RayPlacement
from proxima.model.precision import product_rate
from proxima.training.stack import TrainStack, UpdateResult


def device_figures(
    result: UpdateResult, stack: TrainStack, placement: Any, tokens: float, seconds: float
) -> dict[str, float]:
    """Return the speed of a step on its devices, and their memory.

        mfu = FLOP of the model in the update / (its seconds · ranks · measured FLOP/s of matrix products)

    Args:
        result: of the policy's update. stack: the policy's.
        placement: of the config. tokens: of which the speed is meant. seconds: of the whole step.
    Returns: `time/update` and `tokens_per_second/device`; `device/flops_per_second`, of the model on a rank, and
        `device/mfu`, where the sizes of the model are known; `device/memory_allocated` and `device/memory_reserved`,
        bytes, where torch counts them. Empty for a step without an update.
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
    if result.memory is not None:
        figures["device/memory_allocated"] = float(result.memory.allocated)
        figures["device/memory_reserved"] = float(result.memory.reserved)
    return figures


def engine_devices(placement: Any) -> float:
    """Return how many devices the servers of `placement.engines` have beside those of the ranks."""
    if not isinstance(placement, RayPlacement) or placement.colocate:
        return 0.0
    return placement.engines * (placement.gpus_per_engine or 1.0)
