"""The likelihood of the chosen completion, a term of mixtures."""

from dataclasses import dataclass

import torch
from torch import Tensor

from proxima.core.preference.protocol import Pairwise, PreferencePairs


@dataclass(frozen=True)
class Sft(Pairwise):
    """Negative log-likelihood of the chosen completion, scaled so that the mean over pairs is one over tokens (T16)."""

    def __call__(self, p: PreferencePairs) -> Tensor:
        return -p.chosen * len(p.chosen) / p.chosen_length.sum().clamp(min=1)

    def denominator(self, chosen_length: Tensor) -> Tensor:
        """The number of tokens of the chosen completions."""
        return chosen_length.sum(dtype=torch.float64)
