"""Rendezvous and shutdown of the ranks: the store, the lifelines, the comparison of facts, and the process group."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

from proxima.data import FieldError, UserError
from proxima.process.entry import end_with_parent
from proxima.train.ranks import RankError, Ranks

if TYPE_CHECKING:
    from proxima.runtime.placement.lifeline import Lifeline
    from proxima.train.process_ranks import ProcessRanks

IDLE = timedelta(days=30)  # that a rank may wait for its next call; the watchdog ends a run that hangs
SLACK = 120.0  # seconds that a collective waits longer than the watchdog, which can report more
MEET_SECONDS = 300.0  # that a rank may start later than another; less with a shorter `placement.timeout`
_groups = count()


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


@contextmanager
def first_rank(placement: Any, facts: Mapping[str, Any]) -> Iterator[Ranks]:
    """`ranks_of` on rank 0, of which these are the facts."""
    from proxima.runtime.loop.training_loop import RunEnded
    from proxima.runtime.placement.agreement import compare_facts
    from proxima.runtime.placement.rank_watch import RankWatch, last_line, terminated_by_launcher

    store, key = _store(_patience(placement))
    ranks = _ranks(placement)
    watch = RankWatch(ranks.size, ranks.status.beat, lambda: ranks.in_call, placement.timeout)
    ranks.watch = watch
    with terminated_by_launcher(watch):
        try:
            store.set(key, f"{watch.port} {watch.token}")
            peers = watch.meet(_patience(placement))
            compare_facts({watch.name(0): facts} | {peers[rank].name: peers[rank].facts for rank in sorted(peers)})
            _connect(store, key, ranks, placement)
            yield ranks
        except Exception as error:
            failure = watch.cause(error)
            if isinstance(error, RankError):  # the other ranks have continued, and know of the end
                watch.await_farewells()
                raise RunEnded(f"{error}; its traceback is in log.txt; resume with --resume") from error
            watch.take()
            if failure is None or (failure.refused and isinstance(error, UserError)):
                raise  # this rank's own; or all ranks have found the same error
            if failure.refused:
                raise UserError(last_line(failure)) from error
            raise RunEnded(last_line(failure), reported=True) from error
        if ranks.in_call or watch.failure is not None:
            return  # others may wait in a collective, and destroying the group would wait for them
        watch.await_farewells()
        watch.close()
        _disconnect()


@contextmanager
def other_rank(placement: Any, facts: Mapping[str, Any]) -> Iterator[Ranks]:
    """`ranks_of` on another rank."""
    from proxima.runtime.placement.lifeline import ForwardedLines, obey_rank_zero

    store, key = _store(_patience(placement))
    ranks = _ranks(placement)
    lifeline = _lifeline(store, key, facts=facts, beat=ranks.status.beat, timeout=placement.timeout)
    obey_rank_zero()
    lines = ForwardedLines(lifeline)
    try:
        with redirect_stdout(lines), redirect_stderr(lines):
            _connect(store, key, ranks, placement)
            yield ranks
    except BaseException as error:
        lifeline.report(error)
        raise SystemExit(1) from error
    lifeline.close()
    _disconnect()


def _lifeline(store: Any, key: str, **options: Any) -> "Lifeline":
    from proxima.runtime.placement.lifeline import Lifeline

    try:
        port, token = store.get(key).decode().split()
    except Exception:
        raise _no_rank_zero(f"did not come within {store.timeout.total_seconds():g} s") from None
    try:
        return Lifeline((os.environ["MASTER_ADDR"], int(port)), token, **options)
    except OSError as error:
        raise _no_rank_zero(f"does not answer at port {port}: {error.strerror or error}") from None


def _no_rank_zero(what: str) -> UserError:
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    remedy = "see its messages, check MASTER_ADDR and that the nodes reach one another, and start all ranks again"
    return UserError(f"rank 0 ({place}) {what}", remedy=remedy)


def _store(seconds: float) -> tuple[Any, str]:
    """The store where the ranks meet, and a key for this group, as the same processes may form several in turn."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if "TORCHELASTIC_RUN_ID" in os.environ:  # this process ends with torchrun, however that ends
        end_with_parent()
    key, port = f"proxima/{next(_groups)}", os.environ["MASTER_PORT"]
    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(port),
            is_master=os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except Exception as error:  # of several classes
        if os.environ["RANK"] != "0":
            raise _no_rank_zero(f"could not be reached within {seconds:g} s") from None
        reason = "is in use on this machine" if "EADDRINUSE" in str(error) else " ".join(str(error).split())
        raise FieldError("MASTER_PORT", port, reason, remedy="set another port for the ranks to meet at") from None
    return store, key


def _ranks(placement: Any) -> "ProcessRanks":
    from proxima.train.process_ranks import ProcessRanks

    together = placement.tensor_parallel * placement.context_parallel
    return ProcessRanks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), together=together)


def _connect(store: Any, key: str, ranks: "ProcessRanks", placement: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    from proxima.train.sharded_checkpoint import ShardedWriter

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=PrefixStore(key, store),
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timedelta(seconds=placement.timeout + SLACK),
    )
    ranks.objects = dist.new_group(backend="gloo", timeout=IDLE)
    ranks.writer = ShardedWriter()


def _disconnect() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


def _patience(placement: Any) -> float:
    return min(MEET_SECONDS, float(placement.timeout))
