"""Log-probs of given tokens by an engine: a reference or a teacher that runs elsewhere."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from proxima.data import UserError
from proxima.data.columns import Floats
from proxima.data.flow import REPAIR
from proxima.data.packed_batch import PackedBatch, pack
from proxima.data.trajectory import Trajectory
from proxima.engine.protocol import Engine, ScoreRequest, close_engine


@dataclass(frozen=True, kw_only=True)
class EngineStage:
    """Fills a column [N] with the log-probs, nats, of an engine that scores, at the sampling temperature of the tokens.

    Args:
        column: `reference_log_prob` or `teacher_log_prob`.
        engine: whose weights do not change.

    Raises:
        UserError: the number of log-probs from the engine differs from the number of tokens, or some are NaN.
    """

    on_rank_zero: ClassVar = True

    column: str
    engine: Engine
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)

    def pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        return pack(trajectories, share_prompt=False)  # each prompt before its response, to read off requests

    def __call__(self, batch: PackedBatch) -> Tensor:
        prompts = np.split(batch.tokens.numpy(), batch.edges[1:-1])[::2]
        edges = batch.cu_seqlens[1:-1].tolist()
        targets, temperatures = (np.split(x.numpy(), edges) for x in (batch.target, batch.temperature))
        requests = [
            ScoreRequest(prompt_tokens=prompt, tokens=tokens, temperature=float(temperature[0]))
            for prompt, tokens, temperature in zip(prompts, targets, temperatures, strict=True)
            if len(tokens)
        ]
        scores = self.runner.run(self.engine.score(requests))
        self._check(requests, scores)
        return torch.from_numpy(np.concatenate([np.empty(0, np.float32), *scores]))

    def _check(self, requests: Sequence[ScoreRequest], scores: Sequence[Floats]) -> None:
        """Require one number for each token: a column that is shifted by one would train on the wrong tokens."""
        expected, scored = [len(request.tokens) for request in requests], [len(column) for column in scores]
        if expected != scored:
            counts = (
                f"{sum(scored)} log-probs of {len(scored)} completions for {sum(expected)} tokens of {len(expected)}"
            )
            raise UserError(f"{self.column}: the engine that scores gives {counts}", remedy=REPAIR)
        if (lost := sum(int(np.isnan(column).sum()) for column in scores)) > 0:
            reason = f"the engine that scores gives NaN for {lost} of {sum(expected)} tokens"
            raise UserError(f"{self.column}: {reason}", remedy=REPAIR)

    def close(self) -> None:
        """Close the engine. The runner stays open: it can't be closed while the event loop of a run is running."""
        close_engine(self.engine)
