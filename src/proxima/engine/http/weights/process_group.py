"""Broadcasts weights to the workers of all servers over a process group: gloo, or NCCL where all are on GPUs. A bucket
is filled in the memory of the trainer's device while the one before it is sent.

A group is made of the trainer, as rank 0, and the workers of the replicas that are pushed together, or of one replica
whose server has no deadlines (`ServerFacts.joint_groups`). It is formed over a TCPStore of the trainer's and is not
torch's default group. The same replicas use the same group again; any other set, and any replica that was pushed alone
in between, needs a new one. Several groups are sent each bucket at the same time: the weights are read once.

If a group breaks, it is aborted, so that no member waits for its deadline; other groups go on. Replicas whose own call
failed, or which do not answer, are left out, and the others, still paused, are sent the weights again. If that breaks
too, each gets them over a group of its own.
"""

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from itertools import count
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]  # not in torch's stubs

from proxima.data import UserError
from proxima.engine.http.answer_values import one_line
from proxima.engine.http.dialect import GroupMember
from proxima.engine.http.replica import Replica
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.http.weights.buckets import Bucket, without_gaps
from proxima.engine.http.weights.stream import (
    NAME,
    Errors,
    OutdatedError,
    StreamedWeights,
    StreamTransport,
    device_of,
    devices_of,
    in_new_thread,
)
from proxima.engine.http.weights.transport import Receivers
from proxima.engine.protocol import EngineSetup, ServerError, WeightUpdate
from proxima.system.web_requests import is_loopback

CPU = torch.device("cpu")
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_MAKING = threading.Lock()  # held while a group of NCCL is made
FORM_SECONDS = 20.0  # for all members to join; each is ready when the trainer begins
ABORT_SECONDS = 30.0  # for the other calls to end after an abort, which does not end the forming of a group
HEALTH_SECONDS = 10.0  # for a member to answer after a break
# what a member that hangs may cost, one after the other, in parts of the weights' seconds; together they leave room
BUCKET_PART = 1 / 4  # for a bucket to arrive
ABORT_PART = 1 / 3  # for the calls to all members to end; more than they wait for a bucket, or for the group to form
SOUND_PART = 1 / 4  # for a member to say whether it is sound
REMEDY = (
    "let the servers connect to this machine, and to one another, at any port, or set engine.transfer=folder "
    "engine.weight_folder=FOLDER, a folder that all of them see"
)
Addresses = Mapping[str, str | ServerError]  # this machine's as each server sees it, by the server's URL


class GroupTransport(StreamTransport):
    """See `WeightTransport`. Not for servers on the trainer's own GPUs: NCCL refuses two members on one."""

    _numbers = count(1)

    def __init__(self, spec: ServerSettings, setup: EngineSetup) -> None:
        super().__init__(spec, setup)
        self._groups = dict[tuple[str, ...], SenderGroup]()  # those that will be used again, by the URLs of the members

    @classmethod
    def unreached(cls, servers: Receivers) -> str | None:
        """See `WeightTransport`."""
        if not servers.offer("group"):
            return "is not offered by every server"
        if servers.shared and servers.on_gpus:
            return "is not possible where they share the trainer's GPUs: a group would have two members on one"
        return None

    @classmethod
    def cost(cls, servers: Receivers) -> float:
        """See `WeightTransport`: over NVLink or a network for GPUs; gloo sends some 1 GB a second."""
        return 0.1 if servers.on_gpus else 2.0

    @classmethod
    def reason(cls, servers: Receivers) -> str:
        if servers.on_gpus:
            return "the servers compute on GPUs, and all of them can join a group"
        where = "may be" if servers.spec.url_file is not None else "are"
        return f"the servers {where} on other machines, and all of them can join a group"

    async def check(self, replicas: Sequence[Replica], update: WeightUpdate) -> None:
        """See `WeightTransport`. Forms a group with these servers, as each push does, and closes it. A server that does
        not answer is left out: a push ejects it. Over NCCL this only shows that they reach the trainer's store."""
        if not replicas or not all(replica.dialect.checks_transfers for replica in replicas):
            return
        await self._check_devices(replicas, update)
        addresses = await self._addresses(replica.url for replica in replicas)
        store = new_store(addresses, self.spec.weight_seconds)
        group = SenderGroup(store, replicas, next(self._numbers), FORM_SECONDS, device_of(update.module))

        async def join(replica: Replica) -> None:
            member = group.member(replica.url, host_for(replica.url, addresses))
            await replica.dialect.check_transfer(replica.client, "group", asdict(member), 3 * FORM_SECONDS)

        async def form() -> None:
            await in_new_thread(group.form, host_for(replicas[0].url, addresses))

        joins = [join(replica) for replica in replicas]
        outcomes = await asyncio.gather(*joins, form(), return_exceptions=True)
        await in_new_thread(group.abort)
        errors = [error for error in outcomes if error is not None]
        if not errors:
            return
        answering = await _those_that_answer(replicas)
        if len(answering) < len(replicas):
            return await self.check(answering, update)
        if not isinstance(errors[0], ServerError | UserError | RuntimeError | OSError):
            raise errors[0]
        urls = ", ".join(replica.url for replica in replicas)
        reason = f"no process group can be formed with {urls}: {one_line(str(errors[0]))}"
        raise UserError(reason, remedy=REMEDY) from errors[0]

    async def _check_devices(self, replicas: Sequence[Replica], update: WeightUpdate) -> None:
        """Raise UserError if a server is on a GPU of the ranks: NCCL refuses two members on one."""
        on_gpus = [replica for replica in replicas if replica.facts.device == "cuda"]
        if not on_gpus or device_of(update.module).type != "cuda":
            return
        devices = await self.compute(devices_of, update.module)
        for replica in on_gpus:
            try:
                await replica.dialect.check_transfer(replica.client, "devices", devices, self.spec.call_seconds)
            except ServerError:  # it is on another one
                continue
            reason = f"{replica.url} is on a GPU of the trainer's, and a group can't have two members on one"
            raise UserError(reason, remedy="use engine.transfer=ipc, or start it on another GPU")

    async def close(self) -> None:
        """End the groups."""
        self._drop_groups(list(self._groups))
        await super().close()

    async def send(self, weights: StreamedWeights, replicas: Sequence[Replica], *, alone: bool) -> Errors:
        """See `StreamTransport`. After a break it is sent again, to those that are sound."""
        if alone:
            errors, _ = await self._send_once(weights, replicas)
            return errors
        failed = Errors()
        remaining = list(replicas)
        for _ in range(2):
            errors, broken = await self._send_once(weights, remaining, reuse=True)
            if not errors:
                return failed
            sound = await asyncio.gather(*(_is_sound(replica, weights) for replica in errors))
            remaining.clear()
            for (replica, error), is_sound in zip(errors.items(), sound, strict=True):
                if replica in broken and is_sound:
                    remaining.append(replica)
                else:
                    failed[replica] = error
            if not remaining:
                return failed
        errors, _ = await self._send_once(weights, remaining, apart=True)
        return failed | errors

    async def _send_once(
        self, weights: StreamedWeights, replicas: Sequence[Replica], *, reuse: bool = False, apart: bool = False
    ) -> tuple[Errors, set[Replica]]:
        """Send to all of these at once. Returns the error of each that has not got the weights, and those whose group
        broke.

        Args:
            reuse: use the groups of the last sync that have the same members, and keep them for the next one.
            apart: each has a group of its own.
        """
        addresses = await self._addresses(replica.url for replica in replicas)
        groups = dict[SenderGroup, Sequence[Replica]]()
        for members in _together(replicas, apart=apart):
            groups[self._group(members, weights, addresses, reuse=reuse)] = members
        try:
            errors = await _Sending(self, weights, groups, addresses).run()
            broken = set[Replica]()
            for group, members in groups.items():
                if group.broken:
                    broken.update(members)
            return errors, broken
        finally:
            for group in groups:
                if group is not self._groups.get(group.urls) or group.broken:
                    group.abort()

    def _group(
        self, members: Sequence[Replica], weights: StreamedWeights, addresses: Addresses, *, reuse: bool
    ) -> "SenderGroup":
        urls = tuple(replica.url for replica in members)
        former = self._groups.get(urls) if reuse else None
        if former is not None and not former.broken:
            return former
        # a worker is in one group at a time
        overlapping = [others for others in self._groups if not set(urls).isdisjoint(others)]
        self._drop_groups(overlapping)
        store = new_store(addresses, self.spec.weight_seconds)
        seconds = BUCKET_PART * weights.seconds
        group = SenderGroup(store, members, next(self._numbers), seconds, device_of(weights.module))
        if reuse:
            self._groups[urls] = group
        return group

    def _drop_groups(self, members: Iterable[tuple[str, ...]]) -> None:
        for urls in members:
            self._groups.pop(urls).abort()

    async def _addresses(self, urls: Iterable[str]) -> Addresses:
        """The addresses for these servers and for all that the recipe lists."""
        listed = self.spec.urls if self.spec.url_file is None else ()  # a file may be unreadable at this moment
        return await asyncio.to_thread(own_addresses, {*listed, *urls})


def _together(replicas: Sequence[Replica], *, apart: bool) -> list[Sequence[Replica]]:
    """The members of each group for these replicas."""
    if apart:
        return [[replica] for replica in replicas]
    joint = [replica for replica in replicas if replica.facts.joint_groups]
    groups = list[Sequence[Replica]]()
    if joint:
        groups.append(joint)
    groups.extend([replica] for replica in replicas if not replica.facts.joint_groups)
    return groups


class SenderGroup:
    """The trainer's end of a process group. Formed by the first send.

    Args:
        store: its own, which ends with it: a member that still waits there is told.
        number: part of its name, so that no other group has it.
        seconds: deadline of each broadcast; shorter than that of the servers' calls, or all would end with one.
        device: of the trainer's weights.
    """

    def __init__(
        self, store: TCPStore, replicas: Sequence[Replica], number: int, seconds: float, device: torch.device = CPU
    ) -> None:
        self.urls = tuple(replica.url for replica in replicas)
        # Who does not know the name can't write to the store what the members look for.
        self.name = f"{number}:{secrets.token_hex(16)}:{','.join(self.urls)}"
        self.port = store.port
        self.seconds = seconds
        self.form_seconds = min(FORM_SECONDS, seconds)
        self.ranks = dict[str, int]()
        self.size = 1
        for replica in replicas:
            self.ranks[replica.url] = self.size
            self.size += replica.facts.workers
        on_gpus = all(replica.facts.device == "cuda" for replica in replicas) and device.type == "cuda"
        if on_gpus:
            self.device = device
            self.backend = "nccl"
        else:
            self.device = CPU
            self.backend = "gloo"
        self.formed = False
        self.broken = False
        self.gaps = replicas[0].dialect.gaps
        self._prefixes = replicas[0].dialect.store_prefixes(self.name, self.backend)
        self._group: Any = None
        self._store: TCPStore | None = store
        self._sending = list[Any]()  # the bucket on its way
        self._end = 0.0  # its deadline

    def start(self, bucket: Bucket, content: Tensor) -> None:
        """Begin to broadcast a bucket; the former one has been sent.

        Raises:
            RuntimeError: the group broke.
        """
        options = BroadcastOptions()
        options.timeout = timedelta(seconds=self.seconds)
        self._end = monotonic() + self.seconds
        content = content.to(self.device)
        pieces = [bucket] if self.gaps else without_gaps([bucket])
        for piece in pieces:
            at = piece.start - bucket.start
            self._sending.append(self._broadcast(content[at : at + piece.size], options))

    def wait(self) -> None:
        """Wait until the bucket has been sent.

        Raises:
            RuntimeError: the group broke, or its deadline has passed.
        """
        try:
            while self._sending:
                left = max(self._end - monotonic(), 0.001)
                self._sending.pop().wait(timedelta(seconds=left))
        finally:
            self._sending.clear()  # see `abort`

    def _broadcast(self, content: Tensor, options: BroadcastOptions) -> Any:
        if self._group is None:
            raise RuntimeError("the group was closed")
        return self._group.broadcast([content], options)

    def abort(self) -> None:
        """End it, with every collective that is open. May be called twice, from another thread. The connections of gloo
        are closed with the last reference to the group or to one of its collectives: the members then fail at once."""
        self.broken = True
        group = self._group
        self._group = None
        self._store = None
        if group is not None:
            group.abort()

    def member(self, url: str, host: str) -> GroupMember:
        """A server's membership in the group, as sent to it."""
        return GroupMember(
            name=self.name,
            host=host,
            port=self.port,
            rank=self.ranks[url],
            size=self.size,
            backend=self.backend,
            seconds=self.seconds,
            form_seconds=self.form_seconds,
            reused=self.formed,
        )

    def form(self, host: str) -> None:
        """Form the group, if it is not formed. Blocks until all members have joined."""
        if not self.formed and not self.broken:
            self._group = self._form(host)
            self.formed = True
        if self.broken:  # while it was formed
            self.abort()

    def _form(self, host: str) -> Any:
        prefix: Any = self._store
        for name in self._prefixes:
            prefix = PrefixStore(name, prefix)
        try:
            if self.backend == "nccl":
                from torch.distributed import ProcessGroupNCCL

                nccl_options = ProcessGroupNCCL.Options()
                nccl_options._timeout = timedelta(seconds=self.seconds)
                with _blocking_waits():
                    return ProcessGroupNCCL(prefix, 0, self.size, nccl_options)
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # as above
            options._timeout = timedelta(seconds=self.form_seconds)
            options._devices = [ProcessGroupGloo.create_device(hostname=host)]
            return ProcessGroupGloo(prefix, 0, self.size, options)
        finally:
            del prefix  # an error would keep the store alive, and members waiting


@contextmanager
def _blocking_waits() -> Iterator[None]:
    """An NCCL group that is made in this block raises when a deadline has passed or a member has gone, as a gloo group
    does. By default torch starts a thread for each group, which then ends the process: here, the training run. It
    starts none for a group whose waits block.

    A group has no option for this: its constructor reads the environment. Were the variable set for good, every wait of
    the trainer's own groups would block, too. Groups are formed in several threads, and the lock keeps one from taking
    the variable away while another is made; the constructor itself waits for nobody.

    The worker in the server has a copy, because it can't import this one."""
    with _MAKING:
        before = os.environ.get(BLOCKING_WAIT)
        os.environ[BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[BLOCKING_WAIT]
            else:
                os.environ[BLOCKING_WAIT] = before


def broadcast(
    weights: StreamedWeights, hosts: Mapping[SenderGroup, str], ended: Callable[[SenderGroup, Exception | None], None]
) -> None:
    """Form these groups where they are not, and broadcast all buckets to all of them at once: the next bucket is filled
    while one is sent. A group that breaks gets no more, and the others go on.

    Args:
        hosts: this machine's address for the members of each group.
        ended: told of each group when it has got everything, or has broken.

    Raises:
        OutdatedError: the trainer no longer has these weights.
    """
    going = dict[SenderGroup, None]()

    def attempt(group: SenderGroup, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except (RuntimeError, OSError) as error:
            going.pop(group, None)
            group.abort()
            ended(group, error)

    for group in hosts:
        going[group] = None
    with ThreadPoolExecutor(len(hosts)) as threads:  # one that hangs has the others wait for its deadline alone
        forming = [threads.submit(attempt, group, group.form, host) for group, host in hosts.items()]
    for formed in forming:
        formed.result()
    if not going:
        return
    device = next(iter(going)).device
    if any(group.device == CPU for group in going):
        device = CPU

    def memory(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    with weights.lent():
        for bucket, content in weights.filled(memory):
            for group in list(going):
                attempt(group, group.wait)
            for group in list(going):
                attempt(group, group.start, bucket, content)
            if not going:
                return
        for group in list(going):
            attempt(group, group.wait)
    for group in going:
        ended(group, None)


class _StartLine:
    """Where the calls to the servers, in the event loop, and the thread for tensor work wait for one another: buckets
    are sent when every server is ready to receive them, or its group was given up."""

    def __init__(self, groups: Mapping[SenderGroup, Sequence[Replica]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._unready = {group: set(members) for group, members in groups.items()}
        self._complete = threading.Event()  # for the thread
        self._opened = asyncio.Event()  # for the calls

    def arrive(self, group: SenderGroup, replica: Replica) -> None:
        """This server is ready."""
        self._unready[group].discard(replica)
        self._open_if_complete()

    def leave(self, group: SenderGroup) -> None:
        """The others do not wait for this group any longer."""
        self._unready[group].clear()
        self._open_if_complete()

    def _open_if_complete(self) -> None:
        if not any(self._unready.values()):
            self._opened.set()
            self._complete.set()

    async def begun(self) -> None:
        """Return when the sending begins."""
        await self._opened.wait()

    def late(self, seconds: float) -> set[SenderGroup]:
        """Wait for all servers, in the thread, but no longer than this. Returns the groups that are not ready then."""
        self._complete.wait(seconds)
        return {group for group, unready in self._unready.items() if unready}

    def begin(self) -> None:
        """Begin, whoever is not ready. Called in the thread."""
        self._loop.call_soon_threadsafe(self._opened.set)


class _Sending:
    """One send to several groups.

    This event loop calls the servers, and the thread for tensor work broadcasts. First the loop waits for its turn in
    that thread, then both wait at the start line. `_ends` has what the thread says of its end of each group: that all
    was sent, or the error that broke the group.
    """

    def __init__(
        self,
        transport: GroupTransport,
        weights: StreamedWeights,
        groups: Mapping[SenderGroup, Sequence[Replica]],
        addresses: Addresses,
    ) -> None:
        self.transport = transport
        self.weights = weights
        self.groups = groups
        self.addresses = addresses
        # a member that the abort does not wake ends by the deadline of a broadcast, or of forming the group
        self._abort_seconds = min(ABORT_SECONDS, ABORT_PART * weights.seconds)
        self._loop = asyncio.get_running_loop()
        self._turn: asyncio.Future[None] = self._loop.create_future()
        self._start = _StartLine(groups)
        self._ends: dict[SenderGroup, asyncio.Future[None]] = {group: self._loop.create_future() for group in groups}

    async def run(self) -> Errors:
        """Return the error of each replica that has not got the weights. Nothing is asked of a server before the thread
        for tensor work is free: its deadlines would run while an update does.

        Raises:
            OutdatedError: the trainer no longer has these weights.
        """
        sending = asyncio.create_task(self.transport.compute(self._send))
        serving = list[asyncio.Task[Errors]]()
        try:
            await asyncio.wait({self._turn, sending}, return_when=asyncio.FIRST_COMPLETED)
            if not self._turn.done():
                await sending  # raises
            serving += [asyncio.create_task(self._serve(group)) for group in self.groups]
            await asyncio.wait({*serving, sending})
        except asyncio.CancelledError:
            await self._give_up(serving)
            raise
        await sending
        errors = Errors()
        for task in serving:
            errors |= task.result()
        return errors

    async def _give_up(self, serving: Sequence[asyncio.Task[Errors]]) -> None:
        for group in self.groups:
            self._start.leave(group)
            group.abort()
        for task in serving:
            task.cancel()
        if serving:
            await asyncio.wait(serving)

    async def _serve(self, group: SenderGroup) -> Errors:
        """Call the members of a group. If one of them fails, or the trainer's end, the group is ended, and with it the
        wait of the others. Returns the error of each that has failed."""
        end = self._ends[group]
        calls = {asyncio.create_task(self._load(replica, group)): replica for replica in self.groups[group]}
        parties: set[asyncio.Future[None]] = {*calls, end}
        try:
            await asyncio.wait(parties, timeout=3 * self.weights.seconds, return_when=asyncio.FIRST_EXCEPTION)
            if not all(map(_succeeded, parties)):
                self._start.leave(group)
                await in_new_thread(group.abort)
                await asyncio.wait(parties, timeout=self._abort_seconds)
        finally:
            if not all(party.done() for party in parties):
                await self._cancel(group, calls)
        return _errors_of(calls, end)

    async def _cancel(self, group: SenderGroup, calls: Iterable[asyncio.Task[None]]) -> None:
        """End the calls that the end of their group has not ended, or that nobody waits for."""
        self._start.leave(group)
        group.abort()
        for call in calls:
            call.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait(calls, timeout=self._abort_seconds)

    async def _load(self, replica: Replica, group: SenderGroup) -> None:
        host = host_for(replica.url, self.addresses)
        member = asdict(group.member(replica.url, host))

        async def update() -> AsyncIterator[Mapping[str, Any]]:
            self._start.arrive(group, replica)
            await self._start.begun()
            if group.broken or self._ends[group].done():
                raise ServerError(replica.url, NAME, "another member failed")
            plan = self.weights.plan if group.gaps else without_gaps(self.weights.plan)
            tensors = [bucket.as_json for bucket in plan]
            yield {"kind": "group", "content": {"group": member, "tensors": tensors}, "last": True}

        await replica.dialect.load_updates(replica.client, replica.facts, self.weights, update())

    # ---- in the thread for tensor work -------------------------------------------------------------------------------

    def _send(self) -> None:
        """Broadcast to every group that is ready in time. What breaks a group is an error of its servers.

        Raises:
            OutdatedError: the trainer no longer has these weights.
            BaseException: neither the trainer's end nor a server's has failed.
        """
        self.weights.check()
        self._loop.call_soon_threadsafe(self._turn.set_result, None)
        try:
            late = self._start.late(self.weights.seconds / 2)
            hosts = self._hosts(late)
            self._start.begin()
            if hosts:
                broadcast(self.weights, hosts, self._ended)
        except OutdatedError as error:
            self._all_ended(error)
            raise
        except (RuntimeError, OSError, UserError) as error:
            self._all_ended(error)
        except BaseException as error:
            self._all_ended(RuntimeError(str(error)))
            raise

    def _hosts(self, late: set[SenderGroup]) -> dict[SenderGroup, str]:
        """This machine's address for the members of each group that can be sent the weights; the others end."""
        hosts = dict[SenderGroup, str]()
        for group, members in self.groups.items():
            url = members[0].url
            if group in late:
                self._ended(group, RuntimeError("the servers were not ready in time"))
            elif group.broken or isinstance(self.addresses[url], ServerError):
                self._ended(group, RuntimeError("the group was closed"))
            else:
                hosts[group] = host_for(url, self.addresses)
        return hosts

    def _all_ended(self, error: Exception) -> None:
        for group in self.groups:
            self._ended(group, error)

    def _ended(self, group: SenderGroup, error: Exception | None) -> None:
        self._loop.call_soon_threadsafe(_settle, self._ends[group], error)


def _settle(end: "asyncio.Future[None]", error: Exception | None) -> None:
    """Give a future its outcome, if it has none."""
    if end.done():
        return
    if error is None:
        end.set_result(None)
    else:
        end.set_exception(error)
        end.exception()  # it may have no reader


def _succeeded(party: "asyncio.Future[None]") -> bool:
    return party.done() and party.exception() is None


def _errors_of(calls: "Mapping[asyncio.Task[None], Replica]", end: "asyncio.Future[None]") -> Errors:
    """The error of each replica whose call has failed, with that of the trainer's end: a member may know only that the
    connection was closed."""
    own = end.exception() if end.done() else None
    errors = Errors()
    for call, replica in calls.items():
        error = _error_of(call, replica)
        if error is not None and own is not None:
            reason = f"{error.reason}; at the trainer: {one_line(str(own))}"
            error = ServerError(replica.url, NAME, reason)
        if error is not None:
            errors[replica] = error
    return errors


def _error_of(call: "asyncio.Task[None]", replica: Replica) -> ServerError | UserError | None:
    if not call.done() or call.cancelled():
        return ServerError(replica.url, NAME, "it did not answer")
    error = call.exception()
    if error is None or isinstance(error, ServerError | UserError):
        return error
    raise error


def host_for(url: str, addresses: Addresses) -> str:
    """This machine's address for that server and for the others of its group, which have no way to a loopback.
    ServerError: the server has no way to it."""
    own = addresses[url]
    if isinstance(own, ServerError):
        raise own
    if not is_loopback(own):
        return own
    outside = [host for host in addresses.values() if isinstance(host, str) and not is_loopback(host)]
    return min(outside, default=own)


def new_store(addresses: Addresses, seconds: float) -> TCPStore:
    """A store of the trainer's. It listens only at the address at which all servers reach it, if that is one."""
    hosts = {host for host in addresses.values() if isinstance(host, str)}
    listens = hosts.pop() if len(hosts) == 1 else ""
    listener = socket.create_server((listens, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        listens or "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        master_listen_fd=listener.detach(),
    )


def own_addresses(urls: Iterable[str]) -> Addresses:
    """`own_address` of each, or its error. Blocks while names are looked up."""
    addresses = dict[str, str | ServerError]()
    for url in urls:
        try:
            addresses[url] = own_address(url)
        except ServerError as error:
            addresses[url] = error
    return addresses


def own_address(url: str) -> str:
    """This machine's address as that server sees it. ServerError: there is no way to it, or its name is unknown."""
    parts = urlsplit(url)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect((parts.hostname, parts.port or 80))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ServerError(url, "", f"it can't be reached: {error.strerror or error}") from error


async def _is_sound(replica: Replica, weights: StreamedWeights) -> bool:
    """True if the failure may be another member's: it answers, and its workers know of no fault of their own."""
    seconds = SOUND_PART * weights.seconds
    if not await _answers(replica, min(HEALTH_SECONDS, seconds)):
        return False
    if replica.dialect.checks_transfers:
        try:
            await replica.dialect.check_transfer(replica.client, "sound", None, seconds)
        except (ServerError, UserError):
            return False
    return True


async def _those_that_answer(replicas: Sequence[Replica]) -> list[Replica]:
    answers = await asyncio.gather(*(_answers(replica, HEALTH_SECONDS) for replica in replicas))
    return [replica for replica, answered in zip(replicas, answers, strict=True) if answered]


async def _answers(replica: Replica, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await replica.health()
    except (ServerError, UserError, TimeoutError):
        return False
    return True
