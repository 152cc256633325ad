"""Rendezvous and shutdown of the ranks: the store, the lifelines, the comparison of facts, and the process group."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from proxima.data import FieldError, UserError
from proxima.process.entry import end_with_parent
from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.placement.agreement import compare_facts, rank_facts
from proxima.runtime.placement.lifeline import ForwardedLines, Lifeline, obey_rank_zero
from proxima.runtime.placement.rank_listener import watch_addresses
from proxima.runtime.placement.rank_watch import RankWatch, last_line, terminated_by_launcher
from proxima.training.process_ranks import ProcessRanks
from proxima.training.ranks import RankError, Ranks
from proxima.training.sharded_checkpoint import ShardedWriter

IDLE = timedelta(days=30)  # that a rank may wait for its next call; the watchdog ends a run that hangs
SLACK = 120.0  # seconds that a collective waits longer than the watchdog, which can report more
MEET_SECONDS = 300.0  # that a rank may start later than another; less with a shorter `placement.timeout`
WATCH = "watch"  # key of the store: address, port and token of rank 0's watch
_groups = count()


@contextmanager
def met_ranks(config: Any) -> Iterator[Ranks]:
    """`ranks_of` in one of several processes."""
    placement, facts = config.placement, rank_facts(config)
    together = placement.tensor_parallel * placement.context_parallel
    ranks = ProcessRanks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), together=together)
    store = _store(_patience(placement))
    member = _first_rank if ranks.rank == 0 else _other_rank
    with member(store, ranks, facts, placement):
        _connect(store, ranks, placement)
        yield ranks
    if not ranks.in_call and not ranks.losing():  # else others may wait in a collective, and this would wait for them
        dist.destroy_process_group()


@contextmanager
def _first_rank(store: Any, ranks: ProcessRanks, facts: Mapping[str, Any], placement: Any) -> Iterator[None]:
    """Within the block, rank 0 watches the others, which run the same; its end says why the run has ended."""
    listens, called = watch_addresses(os.environ)
    ranks.monitor = watch = RankWatch(ranks, placement.timeout, listens)
    with terminated_by_launcher(watch):
        try:
            store.set(WATCH, f"{called} {watch.port} {watch.token}")
            peers = watch.meet(_patience(placement))
            compare_facts({watch.name(0): facts} | {peers[rank].name: peers[rank].facts for rank in sorted(peers)})
            yield
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
        if not ranks.in_call and not ranks.losing():
            watch.await_farewells()
            watch.close()


@contextmanager
def _other_rank(store: Any, ranks: ProcessRanks, facts: Mapping[str, Any], placement: Any) -> Iterator[None]:
    """Within the block, this rank's lines and its errors go to rank 0."""
    lifeline = _lifeline(store, ranks, facts, placement)
    obey_rank_zero()
    lines = ForwardedLines(lifeline)
    try:
        with redirect_stdout(lines), redirect_stderr(lines):
            yield
    except BaseException as error:
        lifeline.report(error)
        raise SystemExit(1) from error
    lifeline.close()


def _lifeline(store: Any, ranks: ProcessRanks, facts: Mapping[str, Any], placement: Any) -> Lifeline:
    try:
        host, port, token = store.get(WATCH).decode().split()
    except Exception:
        raise _no_rank_zero(f"did not come within {_patience(placement):g} s") from None
    try:
        return Lifeline((host, int(port)), token, ranks, facts, placement.timeout)
    except OSError as error:
        raise _no_rank_zero(f"does not answer at port {port}: {error.strerror or error}") from None


def _no_rank_zero(what: str) -> UserError:
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    remedy = "see its messages, check MASTER_ADDR and that the nodes reach one another, and start all ranks again"
    return UserError(f"rank 0 ({place}) {what}", remedy=remedy)


def _store(seconds: float) -> PrefixStore:
    """The store where the ranks meet, with keys for this group, as the same processes may form several in turn."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # this process ends with torchrun, however that ends
        end_with_parent()
    port = os.environ["MASTER_PORT"]
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
    return PrefixStore(f"proxima/{next(_groups)}", store)


def _connect(store: PrefixStore, ranks: ProcessRanks, placement: Any) -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timedelta(seconds=placement.timeout + SLACK),
    )
    ranks.objects = dist.new_group(backend="gloo", timeout=IDLE)
    ranks.writer = ShardedWriter()


def _patience(placement: Any) -> float:
    return min(MEET_SECONDS, float(placement.timeout))
