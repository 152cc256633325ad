"""Ends the epochs over a batch once the policy has moved far enough."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proxima.core.metrics import Metrics, merge_metrics


@dataclass
class EarlyStop:
    """Called by `TrainStack.update` after each update; decides whether another one follows.

        stop after the epoch whose approximate KL > limit

    The approximate KL of an epoch is `approx_kl`, the k3 estimate of KL(pi_prox || pi) over the loss tokens of its
    updates, each before it moved the weights. So a first epoch of one update measures 0, and an epoch is judged when it
    is complete: its updates are not undone.

    Args:
        limit: nats per token.
        items: number of items in an epoch, which trains on each of them once.
    Edge cases: an epoch without a loss token stops nothing.
    Source: PPO implementations since OpenAI Spinning Up, which stop at 1.5 x target_kl. Differs: these judge single
        updates (Stable-Baselines3) or the last one of an epoch (CleanRL); here all of the epoch's.
    """

    limit: float
    items: int
    epochs: int = 0
    kl: float = 0.0
    _seen: int = 0
    _metrics: list[Metrics] = field(default_factory=list)

    def __call__(self, items: Sequence[Any], metrics: Metrics) -> bool:
        """Return False to stop, from the `items` and `metrics` of the update just made."""
        self._seen += len(items)
        self._metrics.append(metrics)
        if self._seen < self.items:
            return True
        merged = merge_metrics(self._metrics)
        self.kl = merged["approx_kl"].value if "approx_kl" in merged else 0.0
        self.epochs, self._seen, self._metrics = self.epochs + 1, 0, []
        return not self.kl > self.limit

    def figures(self, planned: int) -> dict[str, float]:
        """Metrics of the step, with `planned` epochs: the epochs made, the KL of the last, and whether it stopped
        early."""
        return {
            "early_stop/epochs": float(self.epochs),
            "early_stop/kl": self.kl,
            "early_stop/stopped": float(self.epochs < planned),
        }
