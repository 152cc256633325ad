"""Groups of episodes for tests: spans of tokens, and what is known of them."""

from dataclasses import replace

import numpy as np

from proxima.data.episode import Episode, Span
from proxima.data.flow import Completion, Group, Prompt, Score

NAN = float("nan")


def model(tokens, reward=0.0, turn=0, sampled=True, state=None):
    """A turn of the model: its tokens."""
    return tokens, Span(
        role="assistant", tokens=len(tokens), sampled=sampled, turn=turn, reward=reward, state=state
    )  # fmt: skip


def seen(tokens, turn=0, role="tool"):
    """An observation: its tokens."""
    return tokens, Span(role=role, tokens=len(tokens), turn=turn)


def path(*parts, uid=0, sample=0, turn=0, finish_reason="stop", garbage=NAN, version=0, initial_prompt=None):
    """A path of these `model` and `seen` parts; `garbage` is the log-prob of what the model did not write."""
    tokens = [token for own, _ in parts for token in own]
    sampled = np.array([span.sampled for own, span in parts for _ in own], bool)
    return Completion(
        prompt_uid=uid,
        sample=sample,
        turn=turn,
        tokens=tokens,
        text="",
        sampled_log_prob=np.where(sampled, -0.5, garbage).astype(np.float32),
        untruncated_log_prob=np.where(sampled, -1.0, garbage).astype(np.float32),
        policy_version=np.full(len(tokens), version, np.int32),
        finish_reason=finish_reason,
        temperature=1.0,
        sampled=sampled,
        initial_prompt=initial_prompt,
        episode=Episode(spans=tuple(span for _, span in parts)),
    )


def forked(*paths):
    """One completion of several paths, the last one being its own."""
    numbered = [replace(path, turn=i) for i, path in enumerate(paths)]
    return replace(numbered[-1], earlier=tuple(numbered[:-1]))


def group_of(uid, completions, rewards):
    """`rewards`: None is a failed score."""
    own = tuple(
        replace(c, prompt_uid=uid, sample=i, earlier=tuple(replace(e, prompt_uid=uid, sample=i) for e in c.earlier))
        for i, c in enumerate(completions)
    )
    scores = tuple(Score.failed("x") if r is None else Score(value=r) for r in rewards)
    return Group(prompt=Prompt(uid=uid, messages=(), tokens=(1, uid + 1)), completions=own, scores=scores)
