"""Rendezvous and shutdown of the ranks: the store, the lifelines, the process group; and the checks before any weights
are loaded that all ranks run the same thing, and that each node has what it needs.
"""

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # not in torch's stubs
from torch.distributed.distributed_c10d import PrefixStore

from proxima.config.comparable import flat_values
from proxima.config.scalars import in_one_line
from proxima.config.schema import RunConfig
from proxima.config.sections.offline import OfflineConfig
from proxima.config.sections.placement import RankPlacement
from proxima.data import FieldError, UserError
from proxima.process.entry import end_with_parent
from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.placement.launcher import check_launch
from proxima.runtime.placement.rank_listener import listener_addresses
from proxima.runtime.placement.rank_messages import ForwardedLines, Lifeline, ignore_signals
from proxima.runtime.placement.rank_watch import RankWatch, last_line, terminated_by_launcher
from proxima.system.linux import SHARED_MEMORY
from proxima.system.machine import package_version
from proxima.training.process_ranks import ProcessRanks
from proxima.training.ranks import ALONE, RankError, Ranks
from proxima.version import __version__

IDLE = timedelta(days=30)  # that a rank may wait for its next call; the watchdog ends a run that hangs
SLACK = 120.0  # seconds that a collective waits longer than the watchdog, which can report more
MEET_SECONDS = 300.0  # that a rank may start later than another; less with a shorter `placement.timeout`
MONITOR = "watch"  # key of the store: address, port and token of rank 0's monitor
_groups = count()


def ranks_of(config: RunConfig | OfflineConfig) -> AbstractContextManager[Ranks]:
    """The ranks of the run, of which this process is one; they form a process group within the block, also a single
    rank that shards its models.

    Raises:
        FieldError: as `check_launch`.
        UserError: the ranks do not meet, or do not agree.
        RunEnded: another rank has failed within the block.
    """
    check_launch(config.placement)
    shards = isinstance(config.placement, RankPlacement) and config.placement.shards_models
    return met_ranks(config) if shards else nullcontext(ALONE)


@contextmanager
def met_ranks(config: RunConfig | OfflineConfig) -> Iterator[Ranks]:
    """`ranks_of` where models are sharded."""
    placement = config.placement
    facts = rank_facts(config)
    per_share = placement.tensor_parallel * placement.context_parallel
    ranks = ProcessRanks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), ranks_per_share=per_share)
    store = _store(_patience(placement))
    member = _first_rank if ranks.rank == 0 else _other_rank
    with member(store, ranks, facts, placement):
        _connect(store, ranks, placement)
        yield ranks
    if not ranks.in_call and not ranks.losing():  # else others may wait in a collective, and this would wait for them
        dist.destroy_process_group()


@contextmanager
def _first_rank(
    store: Store, ranks: ProcessRanks, facts: Mapping[str, Any], placement: RankPlacement
) -> Iterator[None]:
    """Within the block, rank 0 watches the others, which run the same; its end says why the run has ended."""
    listens, called = listener_addresses(os.environ)
    monitor = RankWatch(ranks, placement.timeout, listens)
    ranks.monitor = monitor
    with terminated_by_launcher(monitor):
        try:
            store.set(MONITOR, f"{called} {monitor.port} {monitor.token}")
            peers = monitor.meet(_patience(placement))
            by_name = {monitor.name(0): facts}
            for rank in sorted(peers):
                by_name[peers[rank].name] = peers[rank].facts
            compare_facts(by_name)
            yield
        except Exception as error:
            failure = monitor.cause(error)
            if isinstance(error, RankError):  # the other ranks have continued, and know of the end
                monitor.await_farewells()
                raise RunEnded(f"{error}; its traceback is in log.txt; resume with --resume") from error
            monitor.take()
            if failure is None or (failure.refused and isinstance(error, UserError)):
                raise  # this rank's own; or all ranks have found the same error
            if failure.refused:
                raise UserError(last_line(failure)) from error
            raise RunEnded(last_line(failure), reported=True) from error
        if not ranks.in_call and not ranks.losing():
            monitor.await_farewells()
            monitor.close()


@contextmanager
def _other_rank(
    store: Store, ranks: ProcessRanks, facts: Mapping[str, Any], placement: RankPlacement
) -> Iterator[None]:
    """Within the block, this rank's lines and its errors go to rank 0."""
    lifeline = _lifeline(store, ranks, facts, placement)
    ignore_signals()
    lines = ForwardedLines(lifeline)
    try:
        with redirect_stdout(lines), redirect_stderr(lines):
            yield
    except BaseException as error:
        lifeline.report(error)
        raise SystemExit(1) from error
    lifeline.close()


def _lifeline(store: Store, ranks: ProcessRanks, facts: Mapping[str, Any], placement: RankPlacement) -> Lifeline:
    try:
        host, port, token = store.get(MONITOR).decode().split()
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
    launcher_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(port),
            is_master=os.environ["RANK"] == "0" and not launcher_has_it,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except Exception as error:  # of several classes
        if os.environ["RANK"] != "0":
            raise _no_rank_zero(f"could not be reached within {seconds:g} s") from None
        reason = " ".join(str(error).split())
        if "EADDRINUSE" in reason:
            reason = "is in use on this machine"
        raise FieldError("MASTER_PORT", port, reason, remedy="set another port for the ranks to meet at") from None
    return PrefixStore(f"proxima/{next(_groups)}", store)


def _connect(store: PrefixStore, ranks: ProcessRanks, placement: RankPlacement) -> None:
    # derives from torch.distributed.checkpoint, which only several ranks load
    from proxima.training.sharded_checkpoint import ShardedWriter

    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(
        backend,
        store=store,
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timedelta(seconds=placement.timeout + SLACK),
    )
    ranks.objects = dist.new_group(backend="gloo", timeout=IDLE)
    ranks.writer = ShardedWriter()


def _patience(placement: RankPlacement) -> float:
    return min(MEET_SECONDS, float(placement.timeout))


MIB = 2**20
LEAST_SHARED = {"cpu": 1 * MIB, "cuda": 32 * MIB}  # bytes of /dev/shm for each rank of a node, for NCCL's buffers
LEAST_DISK = 64 * MIB  # of the folder for temporary files
OWN = ("folder", "monitor", "view")  # fields that rank 0 alone uses
OF_NODE = "ranks on its node"
REMEDIES = {
    **dict.fromkeys(("proxima", "torch", "transformers", "python"), "install the same version on all nodes"),
    "WORLD_SIZE": "start all ranks with one launcher",
    "device": "give every rank a device of one kind, or set model.device",
    OF_NODE: "placement.sharding=hybrid needs as many on every node; or set placement.sharding=full",
}  # of a difference; of one in any other field, which is one of the config:
ONE_RECIPE = "start every rank with one command line, and one recipe"
COPY = "copy the files of rank 0's node there, or use a shared file system"


def rank_facts(config: RunConfig | OfflineConfig) -> dict[str, Any]:
    """This rank's facts: `same` must agree between ranks, `lack` is what its node lacks."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    same: dict[str, Any] = {
        "proxima": __version__,
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "transformers": package_version("transformers"),
        "WORLD_SIZE": int(os.environ["WORLD_SIZE"]),
        "device": device,
    }
    for path, value in flat_values(config).items():
        if path.split(".")[0] not in OWN:
            same[path] = value
    if same.get("placement.sharding.kind") == "hybrid":
        same[OF_NODE] = ranks_of_node
    return {"same": same, "lack": lack_of_space(LEAST_SHARED[device] * ranks_of_node)}


def lack_of_space(shared: int) -> str:
    """The space that this node lacks, with the remedy, if it needs that many bytes of shared memory; empty: none."""
    bigger = "start its container with a larger one (docker run --shm-size=8g), or empty it"
    memory = (SHARED_MEMORY, shared, bigger)
    disk = (tempfile.gettempdir(), LEAST_DISK, "free some space there, or set TMPDIR on that node")
    for folder, least, remedy in (memory, disk):
        if not os.path.isdir(folder):
            continue
        free = shutil.disk_usage(folder).free
        if free < least:
            return f"{folder} has {free / MIB:,.1f} MiB free, and its node needs {least / MIB:,.0f}; {remedy}"
    return ""


def compare_facts(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare the facts of all ranks, by name (`rank 2 on HOST`), rank 0 first.

    Raises:
        UserError: names the first rank that differs or lacks something, both values and the remedy.
    """
    same = {name: node["same"] for name, node in facts.items()}
    problem = conflict(same, REMEDIES, ONE_RECIPE)
    if problem is not None:
        raise problem
    for name, node in facts.items():
        if node["lack"]:
            raise UserError(f"{name}: {node['lack']}")


def agree_on_files(hashes: Callable[[], Mapping[str, str]], ranks: Ranks) -> None:
    """Check that every node reads the same files. Collective.

    Args:
        hashes: called on the first rank of each node.

    Raises:
        UserError: on rank 0; names rank, file and both hashes. The others raise Refused.
    """
    own: dict[str, str] | None = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        own = {file: digest[:12] for file, digest in hashes().items()}
    gathered = ranks.gather(own)
    hashed = {ranks.name(rank): files for rank, files in enumerate(gathered) if files is not None}
    ranks.agree(conflict(hashed, {}, COPY))


def conflict(values: Mapping[str, Mapping[str, Any]], remedies: Mapping[str, str], remedy: str) -> UserError | None:
    """The error about the first rank whose values differ from those of the first one: the field, both values, and the
    field's remedy, or `remedy`; None if all are the same."""
    first = next(iter(values), "")
    for name, of_rank in values.items():
        for field in dict.fromkeys([*values[first], *of_rank]):
            there = of_rank.get(field, "missing")
            here = values[first].get(field, "missing")
            if there != here:
                shown = f"{in_one_line(there)} there, {in_one_line(here)} here"
                what = f"{name} differs from {first} in {field}: {shown}"
                return UserError(what, remedy=remedies.get(field, remedy))
    return None
