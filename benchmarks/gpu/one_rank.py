"""The sharded path with a world of one: FSDP over NCCL on one GPU, over gloo on a CPU. Every layer is gathered and its
gradients are reduced as on many ranks, and nothing crosses a network."""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.record import Record, earlier, part_options
from benchmarks.gpu.schedule import ROOT, SMALL_RUN
from benchmarks.gpu.sizes import SMALL, WHOLE, drawn_model
from benchmarks.gpu.updates import BEGINNING, SLOWER, Case, stack_of, tell_update, timed_update
from benchmarks.ranks.launch import free_port
from benchmarks.side import clock
from proxima.config.resolution import resolve
from proxima.model.load import on_ranks
from proxima.model.parallel.sharding import Sharding
from proxima.runtime.placement.rendezvous import ranks_of

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
SHARDINGS = {"gathered in bfloat16": "param_dtype: bfloat16", "gathered in float32": "sum_gradients: update"}
CASE = Case("1.7B")


def update(record: Record, name: str, sharding: Sharding, ranks: Any, *, rehearse: bool) -> None:
    """An update of the sharded model, beside that of the same model in `updates`."""
    batch = SMALL if rehearse else WHOLE
    plan = CASE.forecast(batch, rehearse=rehearse, sharding=sharding)
    needed = BEGINNING + SLOWER * (1 + 1 / batch.prompts) * plan.seconds

    def measure() -> None:
        loaded = on_ranks(drawn_model(plan.config), sharding, "auto")
        stack = stack_of(CASE, loaded, rehearse=rehearse, ranks=ranks)
        seconds, metrics = timed_update(stack, batch.trajectories(plan.config.vocab_size), batch.completions)
        expected = earlier(record.file, "updates", f"{CASE}: norm of the gradient")
        tell_update(record, f"{CASE}, {name}", plan, seconds, metrics, expected)
        plain = earlier(record.file, "updates", f"{CASE}: time")
        if plain is not None:
            record.figure(f"{CASE}, {name}: time over that of an ordinary process", seconds / plain, "", predicted=1.0)

    record.case(f"{CASE}, {name}", needed, measure)


def updates(record: Record, *, rehearse: bool) -> None:
    """Updates of each sharding, in one process group."""
    for name, setting in SHARDINGS.items():
        placement = f"placement={{kind: torchrun, sharding: {{{setting}}}}}"
        config: Any = resolve("quickstart", [placement, "model.device=auto"]).config
        source = config.model.source(placement=config.placement)
        assert source.sharding is not None
        with ranks_of(config) as ranks:
            update(record, name, source.sharding, ranks, rehearse=rehearse)


def whole_run(record: Record) -> None:
    """Two steps of a tiny model as a user starts them, by torchrun, and their checkpoint."""
    from tests.tiny import make_tiny

    with tempfile.TemporaryDirectory() as place:
        model = make_tiny("llama", Path(place) / "model")
        placement = f"placement={{kind: torchrun, sharding: {{{SHARDINGS['gathered in bfloat16']}}}}}"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        command = ["-m", "proxima.cli.main", "train", "recipes/quickstart.yaml", f"folder={place}/run", "--quiet"]
        words = [*launcher, *command, f"model.path={model}", placement, *SMALL_RUN.split()]
        free = {name: value for name, value in os.environ.items() if name not in (*ALONE, "MASTER_ADDR", "MASTER_PORT")}
        start = clock()
        ended = subprocess.run(words, cwd=ROOT, env=free, capture_output=True, encoding="utf-8", timeout=record.left)
        if ended.returncode:
            raise RuntimeError(f"exit code {ended.returncode}: {ended.stderr[-2000:]}")
        seconds = clock() - start
        sharded = list(Path(place).glob("run/checkpoints/*/optimizer/shard-*"))
        if not sharded:
            raise RuntimeError("its checkpoint is not sharded")
    record.figure("two steps of `proxima train` by torchrun", seconds, "s")


def main() -> None:
    record, rehearse = part_options("one_rank")
    if rehearse:
        torch.set_num_threads(1)
    os.environ.update(ALONE, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    record.case("one rank", 5, partial(updates, record, rehearse=rehearse))
    record.case("two steps of `proxima train` by torchrun", 20, partial(whole_run, record))


if __name__ == "__main__":
    main()
