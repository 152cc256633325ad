"""Divergences from a teacher: exact numbers over whole vocabularies, bounds, limits, directions."""

import pytest
import torch

from proxima.core import DISTILLATIONS, SequenceMeanTokenMean, TokenMean, distillation_loss
from proxima.core.distillation import ReverseKl
from tests.core.batches import packed

T, V = 5, 40


def logits(seed, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(T, V, generator=draw, dtype=torch.float64)).to(dtype)


def batch(student, teacher, ids, **more):
    """Of logits [T, V]: the first token of the vocabulary is the sampled one, `ids` [T, K] have buckets."""
    own, other = student.log_softmax(1), teacher.log_softmax(1)
    return packed(
        [2, T - 2],
        log_prob=own[:, 0],
        proximal_log_prob=own[:, 0].detach(),
        teacher_log_prob=other[:, 0],
        bucket_log_prob=own.gather(1, ids),
        teacher_bucket_log_prob=other.gather(1, ids),
        **more,
    )


def by_definition(kind, student, teacher, beta=0.5):
    """Over the vocabulary, from probabilities."""
    p, q = student.softmax(1), teacher.softmax(1)
    m = beta * q + (1 - beta) * p
    kl = {name: (a * (a / b).log()).sum(1) for name, a, b in (("pq", p, q), ("qp", q, p), ("pm", p, m), ("qm", q, m))}
    return {"reverse_kl": kl["pq"], "forward_kl": kl["qp"], "js": beta * kl["qm"] + (1 - beta) * kl["pm"]}[kind]


@pytest.mark.parametrize("kind", sorted(DISTILLATIONS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_whole_vocabulary_gives_the_exact_divergence_and_gradient(kind, dtype):
    student, teacher = logits(1, dtype).requires_grad_(), logits(2, dtype)
    actual = DISTILLATIONS[kind](top_k=V)(batch(student, teacher, torch.arange(V).expand(T, V)))
    expected = by_definition(kind, student, teacher)
    exact = {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, **exact)
    gradients = [torch.autograd.grad(x.sum(), student)[0] for x in (actual, expected)]
    torch.testing.assert_close(*gradients, **exact)
    whole = batch(student, teacher, torch.arange(V).expand(T, V))
    metrics = distillation_loss(whole, divergence=DISTILLATIONS[kind](top_k=V), aggregate=TokenMean()).metrics
    assert metrics["distillation/teacher_rest"].value == pytest.approx(0, abs=1e-5)


def test_the_loss_has_a_denominator_and_metrics_of_its_own():
    mask = torch.tensor([True, False, True, True, False])
    b = batch(logits(9), logits(10), torch.arange(3).expand(T, 3), loss_mask=mask)
    value = ReverseKl(top_k=3)(b)
    loss = distillation_loss(b, divergence=ReverseKl(top_k=3), aggregate=TokenMean(), coefficient=0.5)
    assert float(loss.denominator) == 3 and float(loss.value) == pytest.approx(0.5 * float(value.sum()) / 3)
    assert loss.metrics["distillation/divergence"].value == pytest.approx(float(value.sum()) / 3)
    for name, listed in (("teacher", b.teacher_bucket_log_prob), ("student", b.bucket_log_prob)):
        rest = 1 - listed.exp().sum(1)
        assert loss.metrics[f"distillation/{name}_rest"].value == pytest.approx(float(rest[b.loss_mask].mean()))
    gap = (b.log_prob - b.teacher_log_prob)[b.loss_mask].mean()
    assert loss.metrics["distillation/sampled_reverse_kl"].value == pytest.approx(float(gap))
    by_sequence = distillation_loss(b, divergence=ReverseKl(top_k=3), aggregate=SequenceMeanTokenMean())
    assert float(by_sequence.value) == pytest.approx(float(value[0] + value[2:4].mean()) / 2)
    sampled = distillation_loss(b, divergence=ReverseKl(top_k=0), aggregate=TokenMean())
    assert "distillation/teacher_rest" not in sampled.metrics


def test_a_missing_teacher_is_named():
    b = packed(log_prob=torch.zeros(1))
    with pytest.raises(ValueError, match="needs `bucket_log_prob`, which the batch lacks: the model does, given"):
        distillation_loss(b, divergence=ReverseKl(), aggregate=TokenMean())
