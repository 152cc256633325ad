"""Losses that move the chosen and the rejected completion each towards its own target; `sft`, the chosen one."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from proxima.core.preference.protocol import Pairwise, PreferencePairs


@dataclass(frozen=True)
class NcaPair(Pairwise):
    """−log σ(β c) − ½ log σ(−β c) − ½ log σ(−β r). Source: NCA, arXiv 2402.05369."""

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        c = self.beta * c
        r = self.beta * r
        return -logsigmoid(c) - 0.5 * logsigmoid(-c) - 0.5 * logsigmoid(-r)


@dataclass(frozen=True)
class BcoPair(Pairwise):
    """−log σ(β c − δ) − log σ(δ − β r).

    Args:
        shift: δ, fixed; in the paper it is the running mean of the implicit rewards.
    Source: BCO, arXiv 2404.04656. Differs: TRL 1.16 leaves δ at 0.
    """

    shift: float = 0.0

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        return -logsigmoid(self.beta * c - self.shift) - logsigmoid(self.shift - self.beta * r)


@dataclass(frozen=True)
class SppoHard(Pairwise):
    """(c − 1/(2β))² + (r + 1/(2β))²; β multiplies no log-ratio (T13). Source: SPPO, arXiv 2405.00675, Eq. 4.7."""

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        return (c - 0.5 / self.beta).square() + (r + 0.5 / self.beta).square()


@dataclass(frozen=True)
class ApoZero(Pairwise):
    """1 − σ(β c) + σ(β r): raise the chosen, lower the rejected. Source: APO, arXiv 2408.06266, Eq. 7."""

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        return torch.sigmoid(-self.beta * c) + torch.sigmoid(self.beta * r)


@dataclass(frozen=True)
class ApoDown(Pairwise):
    """σ(β c) + 1 − σ(β (c − r)): lower both, the rejected more. Source: APO, arXiv 2408.06266, Eq. 8 (T13)."""

    def loss(self, c: Tensor, r: Tensor) -> Tensor:
        return torch.sigmoid(self.beta * c) + torch.sigmoid(-self.beta * (c - r))


@dataclass(frozen=True)
class Sft(Pairwise):
    """Negative log-likelihood of the chosen completion, scaled so that the mean over pairs is one over tokens (T16)."""

    def __call__(self, p: PreferencePairs) -> Tensor:
        return -p.chosen * len(p.chosen) / p.chosen_length.sum().clamp(min=1)

    def denominator(self, chosen_length: Tensor) -> Tensor:
        """The number of tokens of the chosen completions."""
        return chosen_length.sum(dtype=torch.float64)
