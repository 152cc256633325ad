"""A loss, added to the policy's, that balances the load of an MoE model's experts; metrics of replayed routes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from proxima.core.loss import Loss
from proxima.core.metrics import Metrics, SumCount
from proxima.data.columns import ExpertIds
from proxima.data.packed_batch import PackedBatch
from proxima.data.trajectory import Trajectory
from proxima.model.packed_model import TokenOutputs
from proxima.training.objectives.protocol import Objective


@dataclass(frozen=True, kw_only=True)
class RouterBalance(Objective[Trajectory]):
    """The sequence-wise balance loss, mean over the sequences of an update and over the model's M MoE layers.

        α · mean_s mean_m Σ_e f_e P_e    f_e = E / (K T) · Σ_t [e chosen at t]    P_e = 1/T · Σ_t softmax(logits_t)_e

    over the T positions of a sequence that predict its response tokens, with E experts of which K are chosen. It is α
    if all experts are chosen equally often, and up to α E / K if always the same ones are. No sum extends over several
    sequences, so neither micro-batches nor ranks change it; the gradient flows through P.

    Args:
        coefficient: α.

    Metrics: `routing/balance_loss` (before α); `routing/load_max`, the largest share of an expert in the tokens of its
    layer over the whole update, 1/E if even; `routing/load_entropy`, the entropy of these shares divided by log E, mean
    over layers, 1 if even.

    Source: DeepSeek-V3, arXiv 2412.19437, Eq. 17-20.
    Differs: over response tokens only; with replayed routes, f counts the replayed choices.
    """

    coefficient: float

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"expert_load"})

    def denominators(self, items: Sequence[Trajectory], statistics: Any = None) -> list[Tensor]:
        filled = sum(len(item.tokens) > 0 for item in items)
        return [torch.tensor(float(filled), dtype=torch.float64)]

    def losses(self, batch: PackedBatch, outputs: TokenOutputs, statistics: Any = None) -> list[Loss]:
        count = outputs.need("expert_count")
        probability = outputs.need("expert_probability")
        chosen = count.sum(-1, keepdim=True)
        share = count / chosen.clamp(min=1)
        of_sequence = (share.shape[-1] * share * probability).sum(-1).mean(1).double()
        sequences = (chosen[:, 0, 0] > 0).sum(dtype=torch.float64)
        load = count.sum(0, dtype=torch.float64)
        ones = torch.ones_like(sequences)
        metrics: Metrics = {
            "routing/balance_loss": SumCount(of_sequence.detach().sum(), sequences),
            "routing/load_max": LargestShare(load, ones),
            "routing/load_entropy": LoadEntropy(load, ones),
        }
        return [Loss(self.coefficient * of_sequence.sum(), sequences, metrics)]


def replay_metrics(counts: Tensor) -> Metrics:
    """`routing/differing_fraction`, from `RoutingPass.counts`: the share of the experts replayed at response tokens
    that the trainer's routers would not have chosen."""
    if len(counts):
        return {"routing/differing_fraction": SumCount(*counts.unbind())}
    return {}


def fallback_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """`routing/fallback_fraction`: the share of the tokens of prompts and responses that lack routes to replay in some
    MoE layer; the trainer's routers choose for them."""
    tokens = sum(map(len, trajectories))
    missing = 0
    for item in trajectories:
        missing += _without_routes(item.prompt_routed_experts, len(item.prompt_tokens))
        missing += _without_routes(item.routed_experts, len(item.tokens))
    share = SumCount(
        torch.tensor(float(missing), dtype=torch.float64), torch.tensor(float(tokens), dtype=torch.float64)
    )
    return {"routing/fallback_fraction": share}


def _without_routes(ids: ExpertIds | None, tokens: int) -> int:
    """The number of tokens that lack the experts of some layer, of `tokens` with these `ids`."""
    if ids is None:
        return tokens
    return int((ids[:, :, 0] < 0).any(1).sum())


class LargestShare(SumCount):
    """`sum` [M, E] counts how often each expert of each MoE layer was chosen."""

    @property
    def value(self) -> float:
        """The largest share of an expert in its layer."""
        return float((self.sum / self.sum.sum(1, keepdim=True)).max())


class LoadEntropy(SumCount):
    """`sum` [M, E] counts how often each expert of each MoE layer was chosen."""

    @property
    def value(self) -> float:
        """The entropy of the shares in a layer, divided by log E; the mean over layers."""
        share = self.sum / self.sum.sum(1, keepdim=True)
        entropy = torch.special.entr(share).sum(1) / torch.log(torch.tensor(float(share.shape[1])))
        return float(entropy.mean())
