"""The ranks of a run on several processes, over torch.distributed, and the status of each rank."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from proxima.core.metrics import Metrics, merge_metrics
from proxima.data import NotFiniteError
from proxima.model.parallel.gather import clip_gradients, total_norm
from proxima.model.parallel.sharding import own_slice
from proxima.training.ranks import End, Message, RankError, Ranks, Refused, SharedProblem

T = TypeVar("T")


class ProcessRanks(Ranks):
    """The ranks of the default process group. `objects` is a gloo group of the same ranks, for everything except the
    model's tensors; None: the default group. `writer` is set once the process group exists. Each `ranks_per_share`
    neighbouring ranks compute the same share."""

    def __init__(self, rank: int, size: int, objects: Any = None, ranks_per_share: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.objects = objects
        self.ranks_per_share = ranks_per_share
        self.status = RankStatus(_collectives)

    @contextmanager
    def call(self, message: Message) -> Iterator[None]:
        if self.rank > 0:  # it is in the call that rank 0 has announced
            yield
            return
        self.in_call = True
        self.status.begin(str(message))
        self.share_value(message)
        try:
            yield
        except SharedProblem:
            self.in_call = False
            raise
        else:
            self.in_call = False
        finally:
            if not self.in_call:  # else the run ends in this call, and the watch may still report it later
                self.status.begin("")

    def end(self, outcome: Any) -> None:
        if not self.in_call and not self.losing():  # otherwise they receive nothing, and end when this process does
            self.share_value(End(outcome))

    def receive(self) -> Message:
        """Receive the next message, on the other ranks."""
        self.status.begin("")
        message: Message | None = self.share_value(None)
        assert message is not None
        self.status.begin(str(message))
        return message

    def at(self, part: str) -> None:
        self.status.at(part)

    def share_value(self, value: T) -> T:
        box = [value]
        with self.status.within("broadcast"):
            dist.broadcast_object_list(box, src=0, group=self.objects)
        return box[0]

    def scatter(self, make: Callable[[int], T] | None, *, device: torch.device | str | None = None) -> T:
        values: list[Any] | None = None
        own: Any = None
        if make is not None:
            sent = [make(share) for share in range(self.shares)]
            own = sent[0]
            if device is not None:
                sent = [moved(value, "cpu") for value in sent]
            others = range(1, self.size)
            values = [None, *(sent[rank // self.ranks_per_share] for rank in others)]
        received: list[Any] = [None]
        with self.status.within("scatter"):
            dist.scatter_object_list(received, values, src=0, group=self.objects)
        if make is None:
            own = received[0]
            if device is not None:
                own = moved(own, device)
        share: T = own
        return share

    def agree(self, problem: Exception | None) -> None:
        described = None
        if problem is not None:
            described = (f"{type(problem).__name__}: {problem}", isinstance(problem, NotFiniteError))
        problems = self.gather_everywhere(described)
        rank = next((rank for rank, other in enumerate(problems) if other is not None), None)
        if rank is None:
            return
        self.in_call = False
        if self.rank > 0:
            raise Refused from problem
        if problem is not None:
            raise problem
        text, not_finite = problems[rank] or ("", False)
        message = f"{self.name(rank)}: {text}"
        if not_finite:
            raise SharedProblem(message)
        raise RankError(message)

    def gather(self, value: T) -> list[T]:
        values: list[Any] | None = None
        if self.rank == 0:
            values = [None] * self.size
        with self.status.within("gather"):
            dist.gather_object(moved(value, "cpu"), values, dst=0, group=self.objects)
        if values is None:
            return [value]
        return values

    def gather_shares(self, value: T, *, device: torch.device | str = "cpu") -> list[T]:
        return [moved(each, device) for each in self.gather(value)[:: self.ranks_per_share]]

    def gather_everywhere(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        with self.status.within("all_gather"):
            dist.all_gather_object(values, moved(value, "cpu"), group=self.objects)
        return values

    def gather_metrics(self, metrics: list[Metrics]) -> list[Metrics]:
        return self.gather_shares(merge_metrics(metrics))

    def sum(self, value: Tensor) -> Tensor:
        total = value.detach().cpu().clone()
        if self.rank % self.ranks_per_share:
            total.zero_()
        with self.status.within("all_reduce"):
            dist.all_reduce(total, group=self.objects)
        return total.to(value.device)

    def maximum(self, count: int) -> int:
        largest = torch.tensor(count)
        with self.status.within("all_reduce"):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.objects)
        return int(largest)

    def norm(self, tensors: Iterable[Tensor]) -> Tensor:
        if self.size == 1:  # its slices are the whole tensors: the bits are those of an ordinary process
            return super().norm(map(own_slice, tensors))

        with self.status.within("norm"):
            total: Tensor = total_norm(tensors)
        return total

    def clip(self, parameters: Iterable[nn.Parameter], maximum: float, norm: Tensor) -> None:
        clip_gradients(parameters, maximum, norm)


def _collectives() -> int:
    """Count the collectives that this process has begun, over all groups."""
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


def moved(value: T, device: torch.device | str) -> T:
    """A copy of a value with its tensors, detached, on a device; recursive through dataclasses, lists, tuples and
    mappings."""
    copy: Any = value
    if isinstance(value, Tensor):
        copy = value.detach().to(device)
    elif is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.init]
        copy = replace(value, **{name: moved(getattr(value, name), device) for name in names})
    elif isinstance(value, dict):
        copy = {key: moved(item, device) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        copy = type(value)(moved(item, device) for item in value)
    return cast(T, copy)


class RankStatus:
    """The current activity of a rank, for a watcher in another thread; written by the thread that computes.

    Args:
        issued: counts the collectives that this process has begun, over all its groups; ranks that wait for one another
            differ in it.
    """

    def __init__(self, issued: Callable[[], int] = int) -> None:
        self._issued = issued
        self._last = 0
        self.call = self.part = self.collective = ""
        self.waits = False  # it is in that collective; otherwise that was the last one
        self.moved_at = time.monotonic()

    def begin(self, call: str) -> None:
        """Note the start of a call of rank 0; empty: the rank waits for the next one."""
        self.call = call
        self.part = ""
        self.moved_at = time.monotonic()

    def at(self, part: str) -> None:
        """Note the part of the call that comes next."""
        self.part = part
        self.moved_at = time.monotonic()

    @contextmanager
    def within(self, collective: str) -> Iterator[None]:
        """Note that this rank waits for the others within the block."""
        self.collective = collective
        self.waits = True
        self.moved_at = time.monotonic()
        try:
            yield
        finally:
            self.waits = False
            self.moved_at = time.monotonic()

    def beat(self) -> dict[str, Any]:
        """The status to report; `still` is the number of seconds since the last progress."""
        issued = self._last
        with suppress(Exception):  # a group that is being created or destroyed
            issued = self._issued()
        if issued != self._last:
            self._last = issued
            self.moved_at = time.monotonic()
        return {
            "call": self.call,
            "part": self.part,
            "collective": self.collective,
            "waits": self.waits,
            "issued": issued,
            "still": time.monotonic() - self.moved_at,
        }


def place_of(beat: Mapping[str, Any]) -> str:
    """`update of policy, micro-batch 3 of 8, after gather (collective 41)`."""
    place = beat["call"] or "no call"
    if beat["part"]:
        place = f"{place}, {beat['part']}"
    if not beat["collective"]:
        return place
    where = "in" if beat["waits"] else "after"
    return f"{place}, {where} {beat['collective']} (collective {beat['issued']})"
