"""The output head runs for the tokens that were sampled."""

from dataclasses import replace

import torch

from proxima.core import Reinforce, TokenMean
from proxima.core.correction.score_centering import ScoreCentering
from proxima.training.objectives.policy_objective import PolicyObjective
from tests.model.rows import forked, policy, rows


def with_top_k():
    ids = [torch.arange(2 * len(row.tokens)).view(-1, 2).numpy() for row in forked()]
    return [replace(r, top_k=k, behavior_top_k_log_prob=-1.0 - k) for r, k in zip(forked(), ids, strict=True)]


def test_what_was_not_sampled_is_left_out_and_changes_nothing(monkeypatch):
    runner, seen = policy("qwen3"), []
    for name in ("log_prob", "policy"):
        module = __import__(f"proxima.model.{name}", fromlist=[name])
        whole = module.token_log_prob
        monkeypatch.setattr(
            module, "token_log_prob", lambda h, *a, _of=whole, **k: seen.append(len(h)) or _of(h, *a, **k)
        )
    needs = frozenset({"entropy_gradient"})
    batch = runner.pack(with_top_k())
    outputs = runner(batch, needs)
    every = runner(replace(batch, sampled=torch.ones_like(batch.sampled), sampled_of=batch.tokens_of), needs)
    assert seen == [sum(batch.sampled_of), len(batch.target)] and 0 < seen[0] < 0.7 * seen[1]
    for name in ("log_prob", "entropy", "top_k_log_prob"):
        ours, theirs = getattr(outputs, name), getattr(every, name)
        torch.testing.assert_close(ours[batch.sampled], theirs[batch.sampled], rtol=0, atol=1e-6)
        assert not ours[~batch.sampled].any() and ours.shape == theirs.shape


def test_a_batch_in_which_nothing_was_sampled():
    nothing = [
        replace(row, sampled=[False] * len(row.tokens), loss_mask=[False] * len(row.tokens)) for row in rows((3, (4,)))
    ]
    runner = policy("llama")
    out = runner(runner.pack(nothing)).log_prob
    assert out.shape == (4,) and out.isfinite().all() and out.requires_grad


def test_the_top_k_has_a_gradient_only_if_a_correction_reads_it():
    """Without it `score_centering` would measure its mean and subtract nothing."""
    runner = policy("qwen3")
    common = {"surrogate": Reinforce(), "aggregate": TokenMean()}
    plain, centered = (PolicyObjective(**common, corrections=c) for c in ([], [ScoreCentering()]))
    assert (plain.outputs, centered.outputs) == (frozenset({"entropy"}), frozenset({"entropy", "top_k_gradient"}))
    batch = runner.pack(with_top_k())
    read, unread = (runner(batch, objective.outputs).top_k_log_prob for objective in (centered, plain))
    assert read.requires_grad and not unread.requires_grad
    assert torch.equal(read, unread)
    read[batch.sampled].sum().backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in runner.model.parameters())
