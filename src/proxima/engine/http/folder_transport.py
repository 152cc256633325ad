"""Sends weights through a Hugging Face folder that all servers read."""

from proxima.engine.http.dialect import WeightHandover
from proxima.engine.http.replica import Replica
from proxima.engine.http.staged_files import StagedTransport
from proxima.engine.http.weight_transport import PushRound


class FolderTransport(StagedTransport):
    """See `WeightTransport`. The weights are written once, and each server reads them by itself."""

    buckets = False

    async def push(self, replica: Replica, weights: WeightHandover, push_round: PushRound | None = None) -> None:
        """See `WeightTransport`."""
        await replica.dialect.load_weights(replica.client, replica.facts, weights)
