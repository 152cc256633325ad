"""A loss, added to the policy's, on the tokens with which environments and tools answer: the policy learns to predict
them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxima.core.loss import Loss
from proxima.core.metrics import Metrics, SumCount
from proxima.data.columns import Floats
from proxima.data.flow import Completion
from proxima.data.packed_batch import PackedBatch
from proxima.data.trajectory import Trajectory
from proxima.model.packed_model import TokenOutputs
from proxima.training.objectives.protocol import Objective


@dataclass(frozen=True, kw_only=True)
class Echo(Objective[Trajectory]):
    """The cross-entropy of observations, mean over those of an update.

        1 / M · Σ_t α_t · (−log π(o_t | what came before))        M: the tokens with α_t > 0

    α_t is the trajectory's `echo`, the weight of the role whose message the token is part of. These tokens are in no
    other sum: the loss mask and its denominator have the sampled tokens alone. π is at temperature 1, whatever the
    sampling temperature. An update without such tokens has the loss 0.

    Example: two tool tokens of probability 1/2 and 1/4, α = .1: (.1 log 2 + .1 log 4) / 2 = .104.

    Metrics: `echo/cross_entropy`, nats a token, before α; `echo/fraction`, the share of the response tokens.

    Source: prime-rl's algorithm `echo`, whose default is α = .1 on the messages of tools.
    Differs: there, a renderer that knows which tokens are a message's body leaves out those of the chat template; here
        the template's tokens around a message count, too. An observation that several paths of an episode repeat counts
        once.
    """

    def denominators(self, items: Sequence[Trajectory], statistics: Any = None) -> list[Tensor]:
        count = sum(int((item.echo > 0).sum()) for item in items if item.echo is not None)
        return [torch.tensor(float(count), dtype=torch.float64)]

    def losses(self, batch: PackedBatch, outputs: TokenOutputs, statistics: Any = None) -> list[Loss]:
        weight = batch.echo
        if weight is None:
            raise ValueError("Echo needs `echo` in every trajectory.")
        observed = weight > 0
        log_prob = torch.where(observed, outputs.need("log_prob"), 0.0)
        numerator = -(weight * log_prob).sum(dtype=torch.float64)
        metrics: Metrics = {
            "echo/cross_entropy": SumCount.over(-log_prob.detach(), observed),
            "echo/fraction": SumCount.over(observed, torch.ones_like(observed)),
        }
        return [Loss(numerator, observed.sum(dtype=torch.float64), metrics)]


def observation_weights(paths: Sequence[Completion], roles: Mapping[str, float]) -> list[Floats]:
    """The column `echo` [T] of each path of an episode: the weight of its role at each token of an observation, 0 at
    all others.

    An observation is what answers a message of the model; the initial prompt is none. It counts in the first path that
    has it after the same tokens. What came after the last turn is in no path.

    Args:
        paths: those of one completion, in order.
        roles: role → α, > 0. Several messages between two turns have the role of the first.
    """
    seen: set[tuple[bytes, bytes]] = set()
    columns: list[Floats] = []
    for path in paths:
        column = np.zeros(len(path.tokens), np.float32)
        columns.append(column)
        if path.episode is None:
            continue
        opening = b""
        if path.initial_prompt is not None:
            opening = path.initial_prompt.tokens.tobytes()
        answered = False
        start = 0
        for span in path.episode.spans:
            end = start + span.tokens
            if span.role == "assistant":
                answered = True
            elif answered and span.role in roles:
                place = opening, path.tokens[:end].tobytes()
                if place not in seen:
                    column[start:end] = roles[span.role]
                seen.add(place)
            start = end
    return columns
