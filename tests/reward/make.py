"""Prompts and completions in one line, and a runner that closes itself."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from proxima.data.flow import Completion, Prompt, Score
from proxima.process.worker import Worker
from proxima.reward.runner import RewardRunner

LONG, SHORT = 600.0, 0.1  # seconds for calls that end, and for those that never do


def prompt(answer: Any = None, **metadata: Any) -> Prompt:
    return Prompt(uid=7, messages=({"role": "user", "content": "?"},), tokens=(1, 2), answer=answer, metadata=metadata)


def completion(text: str, *, tokens: int = 3, sample: int = 0) -> Completion:
    return Completion.of_text(7, sample, text, (5,) * tokens)


def completions(*texts: str) -> list[Completion]:
    return [completion(text, sample=i) for i, text in enumerate(texts)]


def rows(table: str) -> list[tuple[str, list[str]]]:
    """(answer, texts) of each line, `answer: text | text`."""
    lines = [line.replace(r"\n", "\n").split(": ", 1) for line in table.strip().splitlines()]
    return [(answer, texts.split(" | ")) for answer, texts in lines]


@contextmanager
def runner(*rewards: Any, **options: Any) -> Iterator[RewardRunner]:
    made = RewardRunner(list(rewards), **{"timeout": LONG, **options})
    try:
        yield made
    finally:
        made.close()


def hurry(monkeypatch: Any, *texts: str) -> None:
    """Give jobs on one of these texts, which never end, a short limit; all others keep theirs."""
    run, marks = Worker.run, [f'"text": {json.dumps(text)}' for text in texts]

    def limited(worker: Worker, job: str, arguments: Any, seconds: float, *others: Any) -> Any:
        endless = any(mark in json.dumps(arguments) for mark in marks)
        return run(worker, job, arguments, seconds * SHORT / LONG if endless else seconds, *others)

    monkeypatch.setattr(Worker, "run", limited)


def ask(made: RewardRunner, row: Any, *texts: str) -> list[Score]:
    """The scores of these texts; `row` is a prompt, or its answer."""
    return asyncio.run(made.score(row if isinstance(row, Prompt) else prompt(row), completions(*texts)))


def scored(rewards: Sequence[Any], row: Any, *texts: str, **options: Any) -> list[Score]:
    """One run of a fresh runner."""
    with runner(*rewards, **options) as made:
        return ask(made, row, *texts)


def values(scores: Sequence[Score]) -> list[float | str | None]:
    """The value of each, or why it has none."""
    return [score.value if score.valid else score.error for score in scores]


def corrects(reward: Any, answer: Any, *texts: str) -> list[bool | None]:
    """The verdicts of a reward called directly, in this process."""
    return [score.correct for score in reward.score(prompt(answer), completions(*texts))]


def any_text(prompt, completion):
    """A user's function: the length of the text."""
    return float(len(completion.text))


def every_text(groups):
    """A user's function of all groups."""
    return [[float(len(completion.text)) for completion in group.completions] for group in groups]
