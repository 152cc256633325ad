"""What only a run of several ranks needs: the start of the others, and the end of rank 0 if one of them fails."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from proxima.model.compute_thread import ComputeThread
from proxima.runtime.launch.models import load_models
from proxima.runtime.placement.follower import RankModels, seen_here
from proxima.runtime.placement.rendezvous import agree_on_files
from proxima.training.checkpoint import read_checkpoint, restore
from proxima.training.messages import Start
from proxima.training.ranks import RankMonitor, Ranks
from proxima.training.stack import POLICY


def start_rank(make_work: Callable[[], Any], ranks: Ranks, message: Start) -> RankModels:
    """What a run does on rank 0, on the others: data, files, weights, and the state of a checkpoint; `make_work` makes
    its workload."""
    seen_here("run folder", message.folder, Path.is_dir)
    work = make_work()
    if (images := work.images) is not None:
        images.follow(message.folder / "images")
    agree_on_files(work.hashes, ranks)
    checkpoint = None if message.checkpoint is None else seen_here("checkpoint", message.checkpoint, read_checkpoint)
    loaded = load_models(work.load, checkpoint)
    models: RankModels = work.rank_models(loaded, ComputeThread(), ranks, message.checkpoint)
    if checkpoint is not None:
        restore(checkpoint, models.stacks[POLICY], models.others)
    return models


@contextmanager
def cancelled_with(monitor: RankMonitor, log: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Within the block, the run is cancelled if another rank fails; `report` gets warnings, in the event loop."""
    in_loop, task = asyncio.get_running_loop().call_soon_threadsafe, asyncio.current_task()
    assert task is not None
    with monitor.attached(log, lambda text: in_loop(report, text), lambda: in_loop(task.cancel)):
        try:
            yield
        except asyncio.CancelledError as error:
            if monitor.cause(error) is None:
                raise
            raise RuntimeError("cancelled, as a rank has failed") from error  # `rendezvous` reports which one
