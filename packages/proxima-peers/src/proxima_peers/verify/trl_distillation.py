"""TRL's distillation trainers: the divergence of GKDTrainer and of IWOPDTrainer."""

from collections.abc import Iterator

import torch

from proxima.core import DISTILLATIONS, TokenMean, distillation_loss
from proxima.data.policy_batch import PolicyBatch
from proxima.laws.by_hand import as_tensor
from proxima_peers.verify.record import Attempt, Check, Record, UnsupportedRecord

IGNORED = -100  # the label of a position outside the loss


def distillation(record: Record) -> Iterator[Attempt]:
    """generalized_jsd_loss: β = 0 is the forward KL and 1 the reverse KL (T21), in between js. With `top_k`, from the
    top K, with a tail bucket, of the teacher at β = 0 and of the student at 1."""
    p = record.params
    beta = float(p.get("beta", 0.5))
    top_k = int(p.get("top_k", 0))
    if p.get("reduction", "batchmean") != "batchmean" or (not p.get("add_tail", True) and top_k):
        raise UnsupportedRecord("only the reduction batchmean, and the top K with a tail, have a reading")
    if top_k and 0 < beta < 1:
        raise UnsupportedRecord("the union of two top Ks has no reading")
    student, teacher = (record.tensor(f"{side}_logits") for side in ("student", "teacher"))
    labels = as_tensor(record.inputs["labels"])
    student.requires_grad_()
    rows, width, vocabulary = student.shape
    ids = torch.arange(vocabulary).expand(rows * width, vocabulary)
    if top_k:
        likeliest = student if beta == 1 else teacher
        ids = likeliest.detach().flatten(0, 1).topk(top_k).indices
    own, other = ((x / p.get("temperature", 1.0)).log_softmax(-1).flatten(0, 1) for x in (student, teacher))
    b = PolicyBatch(
        log_prob=own[:, 0],
        loss_mask=labels.flatten() != IGNORED,
        cu_seqlens=torch.arange(rows + 1) * width,
        bucket_log_prob=own.gather(1, ids),
        teacher_bucket_log_prob=other.gather(1, ids),
    )
    kind, fields = {0.0: ("forward_kl", {}), 1.0: ("reverse_kl", {})}.get(beta, ("js", {"beta": beta}))
    spec = DISTILLATIONS[kind](top_k=ids.shape[1], **fields)
    loss = distillation_loss(b, divergence=spec, aggregate=TokenMean())
    count = p.get("num_items_in_batch")
    if count is None:
        value = loss.value
    else:
        value = loss.numerator / count
    (gradient,) = torch.autograd.grad(value, student)
    checks = {"loss": value.detach(), "grad_student_logits": gradient}
    yield None, [Check(name, ours, record.leaves[name]) for name, ours in checks.items()]
