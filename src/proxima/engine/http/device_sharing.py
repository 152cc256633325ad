"""Servers on the devices of the trainer: they sleep while it computes. Only those whose facts say `sleeps` do."""

from typing import cast

from proxima.engine.http.dialect import SleepingDialect
from proxima.engine.http.replica import Replica
from proxima.engine.http.replica_pool import ReplicaPool


async def sleep_all(pool: ReplicaPool) -> None:
    """In a pause: every server in service gives up its devices, and none returns before `wake_all`. One that can't is
    ejected."""
    pool.asleep = True
    await pool.each(pool.serving, sleep)


async def wake_all(pool: ReplicaPool) -> None:
    """Every server takes its devices again, and stays paused. One that can't is ejected, and woken when it returns."""
    await pool.each([replica for replica in pool.serving if replica.asleep], wake)
    pool.asleep = False


async def sleep(replica: Replica) -> None:
    """End what it holds, whose KV would be lost, and let it sleep.

    Raises:
        ServerError: it can't be told to.
    """
    await replica.stop("interrupted")
    await cast(SleepingDialect, replica.dialect).sleep(replica.client, replica.facts)
    replica.asleep = True


async def wake(replica: Replica) -> None:
    """Wake it; it stays paused.

    Raises:
        ServerError: it can't be told to.
    """
    replica.asleep = False
    await cast(SleepingDialect, replica.dialect).wake(replica.client, replica.facts)
