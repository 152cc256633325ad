"""Proves a decoder of the local engine on the twin of a model, see `proxima.model.proof`: prompts in one prefill,
longer ones after their cached beginning, then token by token through the cache, against the twin's own logits."""

import copy
from typing import Any

import numpy as np
import torch

from proxima.engine.local.decoder import ROWS, Decoder
from proxima.model.proof import Proof, in_own_thread, off, reason_of

CACHED = 3  # tokens of a prompt that are not run again


def decoder_problem(kind: Any, proof: Proof) -> str | None:
    """How the log-probs of a class of decoders differ from those of the model itself; None if they do not."""
    if kind not in proof.problems:
        try:
            proof.problems[kind] = in_own_thread(lambda: _problem(kind, proof))
        except Exception as error:  # of the model's own code
            proof.problems[kind] = reason_of(error)
    return proof.problems[kind]


@torch.no_grad()
def _problem(kind: Any, proof: Proof) -> str | None:
    decoder: Decoder = kind(copy.deepcopy(proof.twin), torch.float32)
    rows = proof.rows
    prompts = [row.prompt_tokens for row in rows]
    states, kept = decoder.prefill(prompts)
    if decoder.takes_past:
        past = [
            kv[:, :, :, :CACHED] if len(prompt) > CACHED else None for kv, prompt in zip(kept, prompts, strict=True)
        ]
        states, kept = decoder.prefill(prompts, past)
    cache = decoder.new_cache(ROWS)
    cache.reserve(max(map(len, rows)))
    for i, kv in enumerate(kept):
        cache.put(torch.tensor([i]), kv)
    outputs = [[decoder.logits(states)[i]] for i in range(len(rows))]
    for step in range(max(len(row.tokens) for row in rows) - 1):
        tokens, position = (np.zeros(ROWS, np.int64) for _ in range(2))
        for i, row in enumerate(rows):
            at = min(step, len(row.tokens) - 1)  # a shorter row writes its last token again
            tokens[i], position[i] = row.tokens[at], len(row.prompt_tokens) + at
        longest = int(position.max()) + 1
        states = decoder.step(torch.from_numpy(tokens), torch.from_numpy(position), cache, longest)
        for i, logits in enumerate(decoder.logits(states)[: len(rows)]):
            outputs[i].append(logits)
    ours = [torch.stack(given[: len(row.tokens)]) for given, row in zip(outputs, rows, strict=True)]
    return off(torch.cat(ours).float().log_softmax(-1), torch.cat(proof.expected))
