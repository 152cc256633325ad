"""Weights that are read from the trainer's memory each time they are sent: `StreamTransport`. Nothing holds a copy.

A server that returns can be sent the newest weights for as long as the trainer has them: until its next update begins.
Then it waits for the next version, which this update makes. A copy for its sake would be a whole model in host memory,
and gain it one update at most.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from proxima.data import UserError
from proxima.engine.http.dialect import NewWeights
from proxima.engine.http.replica import Replica
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.http.weights.buckets import Bucket, filled_buckets, plan_of, weight_bytes
from proxima.engine.http.weights.transport import PushRound, WeightTransport
from proxima.engine.http.weights.weight_folders import DTYPES
from proxima.engine.protocol import EngineSetup, ServerError, WeightUpdate
from proxima.model.parallel.lending import lender_of, lent, perturbing, rounded

T = TypeVar("T")
Errors = dict[Replica, Exception]
NAME = "/update_weights"  # of the call in errors that no call has raised


class OutdatedError(ServerError):
    """The trainer has begun to change the weights that a server was to be sent; it gets the next ones."""


def check_held(update: WeightUpdate) -> None:
    """Raise OutdatedError unless the trainer has these weights; in the thread for tensor work."""
    if not update.holds():
        raise OutdatedError("", "", "the weights are being trained; it gets the next ones")


@dataclass(frozen=True, kw_only=True)
class StreamedWeights(NewWeights):
    """Weights in the trainer's memory.

    Args:
        update: the trainer's model, and whether it still has these weights.
        plan: the buckets in which they are sent.
        dtype: of the floating-point weights in them; None: unchanged.
        file_names: they have the names of the model's files, see `named_weights`.
        amounts: by which they are perturbed while they are sent; None: they are not.
    """

    update: WeightUpdate
    plan: tuple[Bucket, ...]
    dtype: torch.dtype | None
    file_names: bool
    amounts: Sequence[float] | None

    @property
    def module(self) -> nn.Module:
        return self.update.module

    def check(self) -> None:
        """Raise OutdatedError unless the trainer has these weights. Called in the thread for tensor work, as all that
        follows."""
        check_held(self.update)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Within the block they can be read."""
        self.check()
        with lent(self.module), rounded(self.module, self.dtype):
            if self.amounts is None:
                yield
            else:
                with perturbing(self.module, list(self.amounts)):
                    yield

    def filled(self, memory: Callable[[int], Tensor]) -> Iterator[tuple[Bucket, Tensor]]:
        """See `filled_buckets`."""
        return filled_buckets(self.module, self.plan, memory, file_names=self.file_names)


class StreamTransport(WeightTransport):
    """The part that transports without copies share. A subclass sends to several replicas at once."""

    keeps_copies = False

    def __init__(self, spec: ServerSettings, setup: EngineSetup) -> None:
        self.spec = spec
        self.setup = setup
        self._thread = ThreadPoolExecutor(1)  # without a thread for tensor work: one reader of the weights at a time

    def prepare(
        self, update: WeightUpdate, label: str, dtype: str | None, amounts: Sequence[float] | None = None
    ) -> StreamedWeights:
        """See `WeightTransport`. Copies nothing."""
        if dtype is not None and dtype not in DTYPES:
            raise UserError(f"weights can't be sent as {dtype!r}", remedy=f"use {', '.join(DTYPES)}")
        sent_as = None if dtype is None else DTYPES[dtype]
        file_names = self.spec.dialect().file_names
        plan = plan_of(update.module, sent_as, file_names=file_names)
        return StreamedWeights(
            version=update.version,
            label=label,
            seconds=self.spec.weight_seconds,
            size=weight_bytes(plan),
            update=update,
            plan=tuple(plan),
            dtype=sent_as,
            file_names=file_names,
            amounts=amounts,
        )

    async def push(self, replica: Replica, weights: StreamedWeights, push_round: PushRound | None = None) -> None:
        """See `WeightTransport`. The replicas of a round are sent the weights at once."""
        if push_round is None:
            errors = await self.send(weights, [replica], alone=True)
        else:
            await push_round.arrive(replica)
            if push_round.outcome is None:
                push_round.outcome = asyncio.create_task(self.send(weights, push_round.members, alone=False))
            try:
                errors = await asyncio.shield(push_round.outcome)
            except asyncio.CancelledError:  # the whole round is: nothing may load weights after it
                push_round.outcome.cancel()
                raise
        if replica in errors:
            raise errors[replica]

    async def send(self, weights: StreamedWeights, replicas: Sequence[Replica], *, alone: bool) -> Errors:
        """Send to all of these. Returns the error of each that has not got the weights.

        Args:
            alone: this replica is not among those that are pushed at each sync.

        Raises:
            OutdatedError: the trainer no longer has these weights.
        """
        raise NotImplementedError

    async def check(self, replicas: Sequence[Replica], update: WeightUpdate) -> None:
        """See `WeightTransport`. It always succeeds."""

    async def close(self) -> None:
        """See `WeightTransport`. There are no copies."""
        self._thread.shutdown(wait=False)

    async def compute(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work in the thread for tensor work, between the trainer's updates; never in the event loop's own."""
        if self.setup.compute is not None and self.setup.compute.serving:
            return await self.setup.compute.run(work, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments))


def device_of(module: nn.Module) -> torch.device:
    """The device on which weights are sent: the one on which they are trained."""
    return next(module.parameters()).device


def gpu_name(device: torch.device) -> str:
    """The name of a GPU that is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def devices_of(module: nn.Module) -> list[str]:
    """The names of all ranks' GPUs; in the thread for tensor work."""
    lender = lender_of(module)
    if lender is None:
        return [gpu_name(device_of(module))]
    with lent(module):
        names: list[str] = lender.everywhere(_gathered_names)
    return names


def _gathered_names(lender: Any) -> list[str]:
    names: list[str] = lender.ranks.gather(gpu_name(device_of(lender.module)))
    return names


async def in_new_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Like `asyncio.to_thread`, but not in one of the loop's threads, which are few: if sends to many servers took them
    all, the calls that these sends wait for could not look up the servers' names."""
    thread = ThreadPoolExecutor(1)
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, call, *arguments)
    finally:
        thread.shutdown(wait=False)
