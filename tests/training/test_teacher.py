"""Distillation in an update: the teacher's columns and the gradient, against plain forwards over the vocabulary."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from proxima.core import CORRECTIONS, DISTILLATIONS, SequenceMeanTokenMean, TokenMean
from proxima.core.distillation import NoPolicyGradient
from proxima.data import UserError
from proxima.engine.local.local_engine import Local
from proxima.engine.protocol import EngineSetup
from proxima.model.policy import Policy
from proxima.training.forward_stage import EngineStage, TeacherStage
from proxima.training.objectives.policy_objective import DistillationTerm
from tests.model.rows import assert_close, loaded, plain_logits
from tests.tiny import VOCABULARY, tiny
from tests.training.helpers import gradients, trainer, trajectories

TEACHER = "qwen2"


def plain(model, row):
    """[T, V] log-probs of every next token at the row's temperature, one sequence alone."""
    return plain_logits(model, row).log_softmax(1)


def stage(**fields):
    settings = {"top_k": 8, "top_k_of": "teacher", "vocabulary": VOCABULARY}
    return TeacherStage(policy=Policy(loaded(TEACHER), log_prob_chunk=3), **(settings | fields))


def reported(item, count=5):
    """With the most probable tokens that an engine reports, and their log-probs."""
    ids = np.arange(count * len(item.tokens)).reshape(-1, count) % VOCABULARY
    return replace(item, top_k=ids, behavior_top_k_log_prob=np.full(ids.shape, -3.0))


def test_the_teachers_columns_are_those_of_plain_forwards():
    items = [item for item in trajectories() if len(item.tokens)]
    teacher = tiny(TEACHER)
    filled = trainer(tokens_per_micro_batch=24).fill([stage()], items)
    with torch.no_grad():
        for before, item in zip(items, filled, strict=True):
            expected = plain(teacher, before)
            target = torch.tensor(item.tokens).long()[:, None]
            torch.testing.assert_close(
                torch.from_numpy(item.teacher_log_prob), expected.gather(1, target)[:, 0], rtol=0, atol=1e-4
            )
            top = expected.topk(8)
            assert item.bucket_token.dtype == np.int32 and np.array_equal(item.bucket_token, top.indices)
            torch.testing.assert_close(torch.from_numpy(item.teacher_bucket_log_prob), top.values, rtol=0, atol=1e-4)
    assert {item.temperature for item in items} == {1.0, 0.8}


def test_the_students_top_k_is_that_of_the_engine():
    items = [reported(item) for item in trajectories()]
    filled = trainer().fill([stage(top_k=4, top_k_of="student")], items)
    teacher = tiny(TEACHER)
    with torch.no_grad():
        for before, item in zip(items, filled, strict=True):
            assert np.array_equal(item.bucket_token, before.top_k[:, :4])
            if len(item.tokens):
                expected = plain(teacher, before).gather(1, torch.tensor(item.bucket_token).long())
                torch.testing.assert_close(torch.from_numpy(item.teacher_bucket_log_prob), expected, rtol=0, atol=1e-4)


def test_a_token_that_the_teacher_lacks_is_named():
    (item, *_) = trajectories()
    beyond = replace(item, tokens=np.full(len(item.tokens), VOCABULARY))
    with pytest.raises(
        UserError,
        match=f"a completion has token {VOCABULARY}, from the padding of .* has only {VOCABULARY} rows; use a",
    ):
        trainer().fill([stage()], [beyond])


def test_a_completion_without_tokens_has_empty_columns():
    empty = next(reported(item) for item in trajectories() if not len(item.tokens))
    for top_k_of in ("teacher", "student"):
        (filled,) = trainer().fill([stage(top_k=4, top_k_of=top_k_of)], [empty])
        assert filled.teacher_log_prob.shape == (0,) and filled.teacher_bucket_log_prob.shape == (0, 4)


def test_an_engine_gives_what_a_forward_gives():
    items = trajectories()
    engine = Local(dtype="float32").build(EngineSetup.of(loaded(TEACHER)))
    t = trainer(tokens_per_micro_batch=24)
    forward, scored = (
        t.fill([teacher_stage], items)
        for teacher_stage in (stage(top_k=0), EngineStage(column="teacher_log_prob", engine=engine))
    )
    for ours, theirs in zip(forward, scored, strict=True):
        np.testing.assert_allclose(theirs.teacher_log_prob, ours.teacher_log_prob, atol=2e-4)
        assert ours.bucket_token is None


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "budget"), [*((kind, 24) for kind in sorted(DISTILLATIONS)), ("reverse_kl", 4096)])
def test_the_gradient_of_an_update_is_that_of_plain_forwards(kind, budget):
    """Over the whole vocabulary, beside no policy gradient; its denominator is that of the whole update."""
    items = trajectories()
    spec = DISTILLATIONS[kind](top_k=VOCABULARY)
    term = DistillationTerm(divergence=spec, aggregate=SequenceMeanTokenMean(), coefficient=0.7)
    t = trainer(surrogate=NoPolicyGradient(), distillation=term, tokens_per_micro_batch=budget)
    assert not any(t.objective.skippable(item) for item in items)  # advantages of 0 are among them
    actual = gradients(t, t.fill([stage(top_k=VOCABULARY)], items))

    student, teacher = tiny("llama"), tiny(TEACHER)
    rows = []
    for item in items:
        mask = torch.tensor(item.loss_mask)
        if not mask.any():
            continue
        p = plain(student, item)
        with torch.no_grad():
            q = plain(teacher, item)
        m = torch.logaddexp(p, q) - np.log(2)
        kl = {"reverse_kl": (p, q), "forward_kl": (q, p)}
        pairs = [(1.0, *kl[kind])] if kind in kl else [(0.5, q, m), (0.5, p, m)]
        rows.append(sum(w * (a.exp() * (a - b)).sum(1) for w, a, b in pairs)[mask].mean())
    (0.7 * torch.stack(rows).mean()).backward()
    assert_close(actual, {name: x.grad for name, x in student.named_parameters()}, 1e-3)


@pytest.mark.slow
def test_losses_of_rewards_and_teacher_add_up():
    items = trajectories()
    term = DistillationTerm(divergence=DISTILLATIONS["reverse_kl"](top_k=8), aggregate=SequenceMeanTokenMean())
    filled = trainer().fill([stage()], items)
    alone = gradients(trainer(surrogate=NoPolicyGradient(), distillation=term), filled)
    rewards = gradients(trainer(), filled)
    both = gradients(trainer(distillation=term, aggregate=TokenMean()), filled)
    assert_close(both, {name: alone[name] + rewards[name] for name in alone}, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [24, 4096])
@pytest.mark.parametrize(
    "corrections", [(), (CORRECTIONS["icepop"](rejected="drop"), CORRECTIONS["importance"](normalise=True))]
)
def test_sources_that_learn_from_one_of_the_two_add_up(corrections, budget):
    """The gradient is that of the rewards over some completions, plus the teacher's over the others, each divided as
    if its completions were alone; also where a correction reads the whole batch and leaves the denominator."""
    items = trajectories()
    filled = trainer().fill([stage()], items)
    term = DistillationTerm(divergence=DISTILLATIONS["reverse_kl"](top_k=8), aggregate=SequenceMeanTokenMean())
    taught = [item.group % 2 == 1 for item in filled]
    settings = {"corrections": corrections, "tokens_per_micro_batch": budget}
    of_rewards = [item for item, is_taught in zip(filled, taught, strict=True) if not is_taught]
    of_teacher = [item for item, is_taught in zip(filled, taught, strict=True) if is_taught]
    rewards = gradients(trainer(**settings), of_rewards)
    alone = trainer(surrogate=NoPolicyGradient(), distillation=term, tokens_per_micro_batch=budget)
    teacher = gradients(alone, of_teacher)
    marked = [replace(item, taught=np.int32(is_taught)) for item, is_taught in zip(filled, taught, strict=True)]
    mixed = trainer(distillation=term, **settings)
    assert_close(gradients(mixed, marked), {name: rewards[name] + teacher[name] for name in rewards}, 1e-5)
    both = gradients(mixed, filled)
    assert any((both[name] - rewards[name] - teacher[name]).abs().max() > 1e-4 for name in both)


def test_a_policy_gives_both_the_engines_and_the_teachers_tokens():
    """Side by side in one pass, the teacher's with gradient."""
    items = []
    for item in trajectories():
        ids = (2 + np.arange(2 * len(item.tokens)).reshape(-1, 2)) % VOCABULARY
        of_teacher = {"bucket_token": ids, "teacher_bucket_log_prob": np.full(ids.shape, -3.0)}
        items.append(replace(reported(item, 3), **of_teacher))
    student = Policy(loaded("llama"), log_prob_chunk=4)
    batch = student.pack(items)
    outputs = student(batch)
    alone = student(replace(batch, bucket_token=None, teacher_bucket_log_prob=None))
    assert torch.equal(outputs.top_k_log_prob.detach(), alone.top_k_log_prob) and alone.bucket_log_prob is None
    assert outputs.bucket_log_prob.requires_grad and not alone.top_k_log_prob.requires_grad
    model = tiny("llama")
    expected = torch.cat(
        [plain(model, item).gather(1, torch.tensor(item.bucket_token).long()) for item in items if len(item.tokens)]
    )
    torch.testing.assert_close(outputs.bucket_log_prob, expected, rtol=0, atol=1e-4)
    outputs.bucket_log_prob.sum().backward()
    expected.sum().backward()
    own = {name: x.grad for name, x in student.named_parameters()}
    assert_close(own, {name: x.grad for name, x in model.named_parameters()}, 1e-4)
