"""Core: the mathematics, one file a slot. Pure functions on tensors: no I/O, no config, no model.

    advantage    rewards → advantages                surrogate/   ratio and advantage → per-token loss
    selection    which completions go on             correction   behavior → proximal weights
    divergence   how far a token has moved           penalty      KL towards the reference, entropy
    aggregate    per-token losses → one number       loss         all of them together: `policy_loss`
    metrics      statistics that merge               segment      sums and quantiles of packed sequences

Usable from any training loop, with nothing else of this project:

    b = PolicyBatch.from_padded(mask, log_prob=…, behavior_log_prob=…, advantage=…)
    policy_loss(b, surrogate=Cppo(delta=0.15), aggregate=TokenMean()).value.backward()

A spec is a frozen dataclass: its fields are its config, checked at construction; calling it is the mathematics.
Imports: torch, stdlib, `proxima.data`. Imported by every room behind it.
To add a method: one dataclass, one line in the slot's dict, one golden file in `tests/golden`; the conformance tests find it in the dict.
"""

from proxima.core.advantage import ADVANTAGES
from proxima.core.aggregate import (
    AGGREGATE_ALIASES,
    AGGREGATES,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    SequenceMeanTokenSumNorm,
    TokenMean,
    TokenSum,
)
from proxima.core.loss import Loss, TokenLoss, policy_loss
from proxima.core.metrics import Peak, SumCount, merge
from proxima.core.penalty import PENALTIES
from proxima.core.selection import SELECTIONS, select
from proxima.core.surrogate import SURROGATES, Cppo, Dppo, Drpo, PpoClip, Reinforce, Spo
from proxima.data import Outcomes, PolicyBatch

__all__ = [
    "ADVANTAGES",
    "AGGREGATES",
    "AGGREGATE_ALIASES",
    "PENALTIES",
    "SELECTIONS",
    "SURROGATES",
    "Cppo",
    "Dppo",
    "Drpo",
    "Loss",
    "Outcomes",
    "Peak",
    "PolicyBatch",
    "PpoClip",
    "Reinforce",
    "SequenceMeanTokenMean",
    "SequenceMeanTokenSum",
    "SequenceMeanTokenSumNorm",
    "Spo",
    "SumCount",
    "TokenLoss",
    "TokenMean",
    "TokenSum",
    "merge",
    "policy_loss",
    "select",
]
