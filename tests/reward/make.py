"""Prompts and completions in one line, and a runner that closes itself."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from proxima.data import Completion, Prompt, Score
from proxima.reward import RewardRunner


def prompt(answer: Any = None, **metadata: Any) -> Prompt:
    return Prompt(uid=7, messages=({"role": "user", "content": "?"},), tokens=(1, 2), answer=answer, metadata=metadata)


def completion(text: str, *, tokens: int = 3, sample: int = 0) -> Completion:
    return Completion(
        prompt_uid=7,
        sample=sample,
        tokens=(5,) * tokens,
        text=text,
        sampled_log_prob=(-1.0,) * tokens,
        untruncated_log_prob=(-1.0,) * tokens,
        policy_version=(0,) * tokens,
        finish_reason="stop",
        temperature=1.0,
    )


def completions(*texts: str) -> list[Completion]:
    return [completion(text, sample=i) for i, text in enumerate(texts)]


@contextmanager
def runner(*rewards: Any, **options: Any) -> Iterator[RewardRunner]:
    made = RewardRunner(list(rewards), **options)
    try:
        yield made
    finally:
        made.close()


def scored(rewards: Sequence[Any], answer: Any, *texts: str, **options: Any) -> list[Score]:
    """One run of a fresh runner."""
    with runner(*rewards, **options) as made:
        return asyncio.run(made.score(prompt(answer), completions(*texts)))


def corrects(reward: Any, answer: Any, *texts: str) -> list[bool | None]:
    """The verdicts of a reward called directly, in this process."""
    return [score.correct for score in reward.score(prompt(answer), completions(*texts))]


def any_text(prompt, completion):
    """A user's function: the length of the text."""
    return float(len(completion.text))


def every_text(groups):
    """A user's function of all groups."""
    return [[float(len(completion.text)) for completion in group.completions] for group in groups]
