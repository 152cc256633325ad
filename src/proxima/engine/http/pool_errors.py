"""How a run says that its servers do not do what it needs, in one line."""

from collections.abc import Sequence

from proxima.data import UserError
from proxima.engine.http.answer_checks import WrongAnswerError
from proxima.engine.http.client import ServerError
from proxima.engine.http.replica import Replica


def no_replica_left(replicas: Sequence[Replica], remedy: str = "start it again") -> UserError:
    """No replica works."""
    reasons = "; ".join(f"{replica.url}: {replica.reason}" for replica in replicas)
    whose = "the server is" if len(replicas) == 1 else f"all {len(replicas)} servers are"
    return UserError(f"engine: {whose} out of service: {reasons}", remedy=f"{remedy}, and resume the run (--resume)")


def too_busy(replicas: Sequence[Replica], seconds: float) -> UserError:
    """Servers that answer, and do nothing."""
    reasons = "; ".join(f"{replica.url}: {replica.busy.reason}" for replica in replicas)
    remedy = "lower engine.max_running or raise engine.away_seconds, and resume the run (--resume)"
    return UserError(f"engine: too busy for a completion for {seconds:g} s: {reasons}", remedy=remedy)


def reason_of(error: ServerError | WrongAnswerError | Exception) -> str:
    """What was wrong, without the address."""
    return error.reason if isinstance(error, ServerError) else str(error)


def gave_up(what: str, times: int, replica: Replica, error: Exception) -> UserError:
    """A call failed again and again."""
    counted = "once" if times == 1 else f"{times} times in a row"
    return UserError(
        f"engine: {what}: failed {counted}, the last time at {replica.url}: {reason_of(error)}",
        remedy="look at the server's log, and resume the run (--resume)",
    )
