"""Log-probs of given tokens under the weights of the local engine."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from proxima.data.columns import Floats
from proxima.engine.local.decoder import Decoder
from proxima.engine.protocol import ScoreRequest

ROWS = 512  # of logits in memory at a time


def score_batches(requests: Sequence[ScoreRequest], most: int) -> Iterator[list[ScoreRequest]]:
    """Group requests, in order, into batches with at most `most` input tokens; a larger request is a batch by
    itself."""
    batch, room = list[ScoreRequest](), most
    for request in requests:
        fed = len(request.prompt_tokens) + max(0, len(request.tokens) - 1)  # the last one predicts nothing
        if batch and fed > room:
            yield batch
            batch, room = [], most
        batch.append(request)
        room -= fed
    if batch:
        yield batch


@torch.no_grad()
def scored(decoder: Decoder, requests: Sequence[ScoreRequest]) -> list[Floats]:
    """Log-probs [T] of each request's tokens, float32, nats, at its temperature; 0 counts as 1."""
    out: list[Floats] = []
    sequences = [np.concatenate([request.prompt_tokens, request.tokens[:-1]]) for request in requests]
    for request, hidden in zip(requests, decoder.hidden(sequences), strict=True):
        states = hidden[len(request.prompt_tokens) - 1 :][: len(request.tokens)]
        target = torch.tensor(request.tokens, dtype=torch.long, device=hidden.device)[:, None]
        column = np.empty(len(request.tokens), np.float32)
        for at in range(0, len(states), ROWS):
            logits = decoder.logits(states[at : at + ROWS]).float() / (request.temperature or 1.0)
            log_prob = logits.log_softmax(1).gather(1, target[at : at + ROWS]).squeeze(1)
            column[at : at + ROWS] = log_prob.cpu().numpy()
        out.append(column)
    return out
