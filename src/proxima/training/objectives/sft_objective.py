"""The objective of supervised fine-tuning."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from proxima.core.loss import Loss
from proxima.data.packed_batch import PackedBatch
from proxima.data.trajectory import Trajectory
from proxima.model.packed_model import TokenOutputs
from proxima.training.objectives.protocol import Objective, loss_tokens


@dataclass(frozen=True, kw_only=True)
class SftObjective(Objective[Trajectory]):
    """Negative log-likelihood of the tokens in the loss mask, the mean over all of them in an update.

        loss = Σ_i Σ_{t in mask_i} -log π(y_t | x_i, y_<t) / Σ_i |mask_i|        nats a token

    The denominator is that of the whole update, before it is split into micro-batches: a token counts the same in a
    long example and in a short one, and no packing or split changes the gradient.

    Differs: TRL's SFTTrainer divides by the same count in transformers from 4.46 on; earlier ones averaged the
        means of their micro-batches.
    """

    def denominators(self, items: Sequence[Trajectory], statistics: Any = None) -> list[Tensor]:
        return [torch.tensor(sum(loss_tokens(item) for item in items), dtype=torch.float64)]

    def losses(self, batch: PackedBatch, outputs: TokenOutputs, statistics: Any = None) -> list[Loss]:
        learnt = torch.nonzero_static(batch.loss_mask, size=sum(batch.in_loss_of)).flatten()  # waits for no device
        nll = -outputs.need("log_prob").double()[learnt]
        return [Loss(nll.sum(), batch.loss_mask.sum().double(), {})]
