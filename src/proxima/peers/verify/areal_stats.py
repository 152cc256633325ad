"""The per-token tensors that AReaL's losses report, padding included (A2, A4, A6)."""

from typing import Any

import torch
from torch import Tensor

from proxima.core.correction import Importance
from proxima.core.surrogate import Sapo
from proxima.peers.verify.record import Padded, Record


def ppo_numbers(
    record: Record, padded: Padded, clip: tuple[float, float, float | None], corrections: list[Any], *, sequence: bool
) -> dict[str, Any]:
    """What `ppo_actor_loss_fn` reports.

    Args:
        clip: how far the ratio may fall and rise, and the dual clip.
        corrections: ours for its rejection sampling: a rejection and plain weights (mask), or weights alone (clamp).
        sequence: one ratio a sequence.
    """
    kept, weight, behave = padded.mask, None, {}
    if corrections:
        *rejecting, weighing = [correction(padded.b) for correction in corrections]
        for one in rejecting:
            kept = kept & (padded.rows(one.keep) != 0)
        weight = torch.where(kept, padded.rows(weighing.weight), 0.0)
        filtered = padded.mask & ~kept if rejecting else padded.mask & (weight != _unbounded(padded, corrections[0]))
        behave = _behave_numbers(record, kept, weight)
        behave["filtered_fraction"] = filtered.sum() / padded.mask.sum().clamp(min=1)
    gap = record.tensor("logp") - record.tensor("prox_logp")
    ratio, advantage = _ratio(record, kept, gap, sequence=sequence)
    low, high, dual = clip
    plain, bounded = -advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high)
    loss, far = torch.maximum(plain, bounded), torch.zeros_like(kept)
    if dual is not None:  # for both signs (A4)
        far = kept & (dual * advantage.abs() < loss)
        loss = torch.minimum(loss, dual * advantage.abs())
    numbers = {
        "loss": loss if weight is None else loss * weight,
        "importance_weight": ratio,
        "approx_kl": gap,
        "clip_mask": kept & (plain < bounded),
        "dual_clip_mask": far,
    }
    return {name: _packed(record, values) for name, values in (numbers | behave).items()}


def sapo_numbers(record: Record, padded: Padded, spec: Sapo) -> dict[str, Any]:
    """What `sapo_loss_fn` reports; a token's ratio is not masked (A6)."""
    gap = record.tensor("logp") - record.tensor("behavior_logp")
    everywhere = torch.ones_like(padded.mask)
    sequence = spec.level == "sequence"
    ratio, advantage = _ratio(record, padded.mask if sequence else everywhere, gap, sequence=sequence)
    positive, negative = (4 / tau * torch.sigmoid(tau * (ratio - 1)) for tau in (spec.tau_positive, spec.tau_negative))
    gate = torch.where(advantage > 0, positive, negative)
    none = torch.zeros_like(padded.mask)
    numbers = {"loss": -gate * advantage, "importance_weight": ratio, "approx_kl": gap, "clip_mask": none}
    numbers |= {"dual_clip_mask": none, "sapo_soft_gate": gate}
    numbers |= {"sapo_scaled_gate_pos": positive, "sapo_scaled_gate_neg": negative}
    return {name: _packed(record, values) for name, values in numbers.items()}


def _ratio(record: Record, kept: Tensor, gap: Tensor, *, sequence: bool) -> tuple[Tensor, Tensor]:
    """The ratio, 0 where not kept, and the advantages: of tokens, or of whole sequences (A5)."""
    advantage = record.tensor("advantages")
    if not sequence:
        return torch.where(kept, gap.exp(), 0.0), advantage
    count = kept.sum(1, keepdim=True).clamp(min=1)
    mean = torch.where(kept, gap, 0.0).sum(1, keepdim=True) / count
    own = torch.where(kept, advantage, 0.0).sum(1, keepdim=True) / count
    return torch.where(kept, mean.exp(), 0.0), torch.where(kept, own, 0.0)


def _behave_numbers(record: Record, kept: Tensor, weight: Tensor) -> dict[str, Any]:
    inside = kept & (weight > 0)
    gap = record.tensor("prox_logp") - record.tensor("behavior_logp")
    return {"behave_imp_weight": weight, "behave_mask": inside, "behave_approx_kl": torch.where(inside, gap, 0.0)}


def _unbounded(padded: Padded, spec: Any) -> Tensor:
    """The weights that a clamp started from."""
    level = spec.level if isinstance(spec, Importance) else "geometric"
    return padded.rows(Importance(level, "none")(padded.b).weight)


def _packed(record: Record, values: Tensor) -> Tensor:
    """[B, T] → [N] where the record's rows were packed: the first `lens` of each."""
    lengths = record.params.get("lens")
    if lengths is None or values.dim() == 0:
        return values
    return torch.cat([row[:length] for row, length in zip(values, lengths, strict=True)])
