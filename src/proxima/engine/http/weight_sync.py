"""How new weights get to replicas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from proxima.engine.protocol import WeightUpdate

if TYPE_CHECKING:
    from proxima.engine.http.replica import Replica


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """New weights at one replica.

    Args:
        url: of the replica.
        version: of the weights.
        how: the way they went, of `ServerFacts.weight_updates`.
        seconds: from the first call to the proof.
        metrics: what the probe found, by name: `probe_mean`, `probe_max` (nats) and the like.
    """

    url: str
    version: int
    how: str
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)


def sync_figures(reports: Sequence[SyncReport]) -> dict[str, Any]:
    """The figures of several replicas as one: each the largest, and of the replica that follows least, whose slope is
    the farthest from 1, also what belongs to that slope; how the weights went and to how many. Empty without any."""
    found: dict[str, Any] = {}
    for report in reports:
        for name, value in {"seconds": report.seconds, **report.metrics}.items():
            found[name] = max(value, found.get(name, value))
    if judged := [report.metrics for report in reports if "slope" in report.metrics]:
        worst = max(judged, key=lambda metrics: abs(metrics["slope"] - 1))
        found |= {name: value for name, value in worst.items() if name.startswith("slope")}
    if reports:
        found |= {"replicas": len(reports), "how": reports[0].how}
    return found


class WeightSync(Protocol):
    """Pushes new weights to each replica, and proves that they arrived. Called from the engine's own loop.

    `ReplicaKeeper.publish` calls `prepare` once, pauses the replicas, calls `push` for all of them concurrently, and
    resumes those for which it returned. For a replica that was away only `push` is called, with the latest weights.
    """

    async def prepare(self, update: WeightUpdate, label: str) -> None:
        """Put the weights where every replica can read them, until the next call.

        Args:
            label: what servers are to call this version; no other run, and no other version, has the same.
        """
        ...

    async def push(self, replica: "Replica") -> SyncReport:
        """Load them into a paused replica, whose completions, if any, are held; reset its prefix cache; prove that it
        computes with the new weights. The server may be left paused or not.

        Raises:
            ServerError: a call failed; the replica is ejected, and gets them before it returns.
            UserError: they are not what it computes with, or it can't take them; the replica is ejected too, and the
                run ends if no other has them.
        """
        ...

    async def close(self) -> None:
        """Remove what `prepare` left behind."""
        ...
