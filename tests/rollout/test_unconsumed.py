"""What a step has not used yet, for the cache of next-policy log-probs."""

from types import SimpleNamespace

from proxima.data import Completion, Group, Prompt, Score
from proxima.rollout.admission import Admission
from proxima.rollout.async_collector import AsyncCollector
from proxima.rollout.collector import Pending, RolloutListener


def completions(uid):
    """Two to train on and the greedy one, the last."""
    return [Completion.of_text(uid, sample, "", [5]) for sample in range(3)]


def test_a_greedy_completion_is_never_unconsumed():
    """Neither one of a finished group nor one that has arrived before the others."""
    prompts = [Prompt(uid=uid, messages=(), tokens=(1,)) for uid in (0, 1)]
    scores = tuple(Score(value=0.0) for _ in range(2))
    group = Group(prompt=prompts[0], completions=tuple(completions(0)[:2]), scores=scores)
    spec = SimpleNamespace(completions=2, greedy_baseline=True)
    generator = SimpleNamespace(spec=spec, now=lambda: 0.0, episodes=None)
    admission = Admission(prompts=2, concurrent=2, max_lag=1, steps=1)
    pending = Pending(groups=(group,), prompts=(prompts[1],))
    collector = AsyncCollector(generator, None, admission, listener=RolloutListener(), pending=pending)
    (arriving,) = (entry for entry in collector._entries.values() if entry.group is None)
    arriving.received = {c.sample: c for c in completions(1)[1:]}
    assert [c.key for _, c in collector.unconsumed()] == [(0, 0, 0), (0, 1, 0), (1, 1, 0)]


def test_a_rejected_group_is_never_unconsumed():
    prompts = [Prompt(uid=uid, messages=(), tokens=(1,)) for uid in (0, 1)]
    scores = tuple(Score(value=0.0) for _ in range(2))
    groups = tuple(Group(prompt=p, completions=tuple(completions(p.uid)[:2]), scores=scores) for p in prompts)
    generator = SimpleNamespace(spec=SimpleNamespace(completions=2), now=lambda: 0.0, episodes=None)
    admission = Admission(prompts=2, concurrent=2, max_lag=1, steps=1)
    pending = Pending(groups=groups, rejected={0: "uniform"})
    collector = AsyncCollector(generator, None, admission, listener=RolloutListener(), pending=pending)
    assert [c.key for _, c in collector.unconsumed()] == [(1, 0, 0), (1, 1, 0)]
