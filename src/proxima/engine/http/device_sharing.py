"""Servers on the trainer's devices, which sleep while it computes. Only servers with `ServerFacts.sleeps` do."""

from proxima.engine.http.replica import Replica
from proxima.engine.http.replica_pool import ReplicaPool


async def sleep_all(pool: ReplicaPool) -> None:
    """During a pause, make every server in service release its devices; none returns to service before `wake_all`. A
    server that fails to sleep is ejected."""
    pool.asleep = True
    await pool.each(pool.serving, sleep)


async def wake_all(pool: ReplicaPool) -> None:
    """Make every server take its devices again; the pause continues. A server that fails to wake is ejected, and woken
    when it returns."""
    await pool.each([replica for replica in pool.serving if replica.pause == "asleep"], wake)
    pool.asleep = False


async def sleep(replica: Replica) -> None:
    """Interrupt its completions, whose KV would be lost, and put it to sleep.

    Raises:
        ServerError: the call failed.
    """
    await replica.stop("interrupted")
    await replica.dialect.sleep(replica.client, replica.facts)
    replica.pause = "asleep"


async def wake(replica: Replica) -> None:
    """Wake it; it stays paused.

    Raises:
        ServerError: the call failed.
    """
    replica.pause = "stopped"
    await replica.dialect.wake(replica.client, replica.facts)
