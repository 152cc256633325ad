"""TRL's offline trainers: DPO, KTO, reward model."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxima.core.preference import PREFERENCES
from proxima.core.preference.kto import Kto
from proxima.core.preference.protocol import PreferencePairs, completion_log_prob, wpo_weight
from proxima.core.value import RewardLoss
from proxima.laws.by_hand import as_tensor
from proxima_peers.verify.record import DOUBLE, Attempt, Check, Record, Tracked

SMOOTHED = ("aot", "aot_unpaired", "exo_pair", "robust")  # 1.16 ignores label_smoothing elsewhere (T12)


def dpo_spec(kind: str, p: Tracked, *, smoothing: bool) -> Any:
    """Our spec for a TRL `loss_type`."""
    cls: Any = PREFERENCES[kind]
    fields: dict[str, Any] = {"beta": p.get("beta", 0.1)}
    if kind in SMOOTHED or (kind == "sigmoid" and smoothing):
        fields["label_smoothing"] = p.get("label_smoothing", 0.0)
    if "divergence" in cls.__dataclass_fields__:
        fields["divergence"] = p.get("f_divergence_type", "reverse_kl").removesuffix("_divergence")
        fields["alpha"] = p.get("f_alpha_divergence_coef", 0.5)
    if kind == "discopop":
        fields["tau"] = p.get("discopop_tau", 0.05)
    return cls(**fields)


def dpo_loss(record: Record) -> Iterator[Attempt]:
    """DPOTrainer._compute_loss"""
    p = record.params
    leaves = {side: record.tensor(f"{side}_logp").requires_grad_() for side in ("chosen", "rejected")}
    masks = {side: as_tensor(record.inputs[f"{side}_mask"]) != 0 for side in leaves}
    lengths = {side: mask.sum(1) for side, mask in masks.items()}
    alpha = 1.0 if p.get("ld_alpha") is None else p["ld_alpha"]
    p.mark_irrelevant("f_divergence_type", "f_alpha_divergence_coef", "discopop_tau")  # to losses without them

    def summed(values: Tensor, side: str, alpha: float = alpha) -> Tensor:
        rows, width = masks[side].shape
        other = lengths["chosen"]
        if side == "chosen":
            other = lengths["rejected"]
        edges = torch.arange(rows + 1) * width
        return completion_log_prob(values.flatten(), masks[side].flatten(), edges, other, alpha)

    pairs = PreferencePairs(
        chosen=summed(leaves["chosen"], "chosen"),
        rejected=summed(leaves["rejected"], "rejected"),
        reference_chosen=summed(record.tensor("ref_chosen_logp"), "chosen"),
        reference_rejected=summed(record.tensor("ref_rejected_logp"), "rejected"),
        chosen_length=lengths["chosen"],
        rejected_length=lengths["rejected"],
    )
    whole = replace(pairs, chosen=summed(leaves["chosen"], "chosen", 1.0))  # `sft` knows no ld_alpha
    kinds = p.get("loss_type", "sigmoid")
    if isinstance(kinds, str):
        kinds = [kinds]
    weights = p.get("loss_weights") or [1.0 for _ in kinds]

    def checks(*, smoothing: bool) -> list[Check]:
        specs = [dpo_spec(kind, p, smoothing=smoothing) for kind in kinds]
        per_pair = torch.zeros(())
        for kind, weight, spec in zip(kinds, weights, specs, strict=True):
            batch = whole if kind == "sft" else pairs
            per_pair = per_pair + weight * spec(batch)
        if p.get("use_weighting"):
            per_pair = per_pair * _on_policy(record, leaves, masks)
        numbers = {name: metric.value for name, metric in specs[0].metrics(pairs).items()}
        numbers |= {"logps/chosen": pairs.chosen.detach().mean(), "logps/rejected": pairs.rejected.detach().mean()}
        return _dpo_checks(record, leaves, per_pair.mean(), numbers)

    ignored = p.get("label_smoothing", 0.0) and "sigmoid" in kinds
    yield None, checks(smoothing=True)
    if ignored:
        yield "T12", checks(smoothing=False)


def _on_policy(record: Record, leaves: dict[str, Tensor], masks: dict[str, Tensor]) -> Tensor:
    out = torch.ones(())
    for side, leaf in leaves.items():
        rows, width = leaf.shape
        read = (f"{side}_logp", f"{side}_mask", f"ref_{side}_logp")
        names = [name for name in record.inputs if side in name and name not in read]  # log Σ p², under any name
        if len(names) != 1:
            raise KeyError(f"{side}: log of the sum of squared probabilities")
        squares = record.tensor(names[0]).flatten()
        edges = torch.arange(rows + 1) * width
        out = out * wpo_weight(leaf.flatten(), squares, masks[side].flatten(), edges)
    return out


def _dpo_checks(record: Record, leaves: dict[str, Tensor], loss: Tensor, numbers: dict[str, Any]) -> list[Check]:
    loose = record.tolerance()
    if not record.single and "exo_pair" in str(record.params["loss_type"]):
        loose = (1e-7, 1e-8)
    gradients = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True)
    pairs = zip(gradients, leaves.values(), strict=True)
    scale = sum(float((slope * leaf.detach()).abs().sum()) for slope, leaf in pairs if slope is not None)
    checks = [record.expect("loss", loss.detach(), *loose, scale=scale)]
    for side, gradient in zip(leaves, gradients, strict=True):
        slope = torch.zeros_like(leaves[side]) if gradient is None else gradient
        checks.append(record.expect(f"grad_{side}_logp", slope, *loose))
    return [*checks, *record.checks(numbers)]


def kto(record: Record) -> Iterator[Attempt]:
    """KTOTrainer._compute_loss"""
    p = record.params
    leaf = record.tensor("logp").requires_grad_()
    mask = record.mask
    rows, width = mask.shape
    edges = torch.arange(rows + 1) * width
    ours = completion_log_prob(leaf.flatten(), mask.flatten(), edges)
    theirs = completion_log_prob(record.tensor("reference_logp").flatten(), mask.flatten(), edges)
    label = as_tensor(record.inputs["label"]) != 0
    kl = torch.zeros(())
    if record.has("kl_logps"):
        kl = (record.tensor("kl_logps") - record.tensor("kl_ref_logps")).mean()
    anchor: Any = {"kto": "kl", "apo_zero_unpaired": "zero"}[p.get("loss_type", "kto")]
    spec = Kto(p.get("beta", 0.1), p.get("desirable_weight", 1.0), p.get("undesirable_weight", 1.0), anchor)
    loss = spec(ours, theirs, label, kl).mean()
    numbers = _kto_numbers(ours.detach(), theirs, label, spec.beta)
    numbers["kl"] = kl.clamp(min=0) if anchor == "kl" else 0.0
    yield None, [*record.loss_checks(loss, leaf, tolerance=DOUBLE), *record.checks(numbers)]


def _kto_numbers(ours: Tensor, reference: Tensor, label: Tensor, beta: float) -> dict[str, Any]:
    """Implicit rewards β (log π − log π_ref) and log-probs, averaged over each side."""
    numbers: dict[str, Any] = {}
    for side, members in (("chosen", label), ("rejected", ~label)):
        numbers[f"rewards/{side}"] = (beta * (ours - reference)[members]).mean()
        numbers[f"logps/{side}"] = ours[members].mean()
    return numbers | {"rewards/margins": numbers["rewards/chosen"] - numbers["rewards/rejected"]}


def reward_model_loss(record: Record) -> Iterator[Attempt]:
    """RewardTrainer.compute_loss"""
    chosen = record.tensor("chosen_rewards").requires_grad_()
    rejected = record.tensor("rejected_rewards").requires_grad_()
    margin = record.tensor("margin") if record.has("margin") else 0.0
    spec = RewardLoss(record.params.get("center_rewards_coefficient") or 0.0)
    token, metrics = spec(chosen, rejected, margin)
    loss = token.mean()
    gradients = torch.autograd.grad(loss, [chosen, rejected])
    checks = [record.expect("loss", loss.detach()), record.expect("grad_chosen", gradients[0])]
    checks.append(record.expect("grad_rejected", gradients[1]))
    numbers = {name: metrics[name].value for name in ("accuracy", "margin")}
    numbers |= {f"{kind}_reward": metrics[f"reward_{kind}"].value for kind in ("mean", "max", "min")}
    yield None, [*checks, *record.checks(numbers)]
