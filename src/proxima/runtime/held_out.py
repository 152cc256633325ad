"""Held-out evaluation: the same engine and the same rewards, on questions that training never sees."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from proxima.data import Completion, Group, Prompt
from proxima.engine.protocol import Engine, Request, Sampling
from proxima.evaluate.eval_metrics import powers_of_two, question_scores
from proxima.evaluate.intervals import bootstrap_mean, wilson
from proxima.reward.runner import RewardRunner
from proxima.runtime.folder import RunFolder
from proxima.runtime.observer import Observer
from proxima.runtime.rollouts import write_evals


@dataclass(kw_only=True)
class Evaluation:
    """Questions, how to sample, and whom to tell.

    Args:
        prompts: the questions; their uids are negative or otherwise outside those of training, so that draws differ.
        samples: completions a question.
        folder: where the answers go; None keeps them to yourself.
    """

    prompts: Sequence[Prompt]
    engine: Engine
    rewards: RewardRunner
    sampling: Sampling
    observer: Observer
    seed: int = 0
    samples: int = 1
    folder: RunFolder | None = None

    async def groups(self, now: Callable[[], float] = lambda: 0.0) -> tuple[list[Group], float]:
        """Generate, and score each question as soon as its answers are complete, beside those still generating.

        Returns: the groups in the order of the questions, and the seconds, by `now`, that scoring took after the last
            answer was there.
        """
        found: dict[int, dict[int, Completion]] = {prompt.uid: {} for prompt in self.prompts}
        by_uid = {prompt.uid: prompt for prompt in self.prompts}
        requests = [
            Request(prompt=p, sample=i, sampling=self.sampling, seed=self.seed)
            for p in self.prompts
            for i in range(self.samples)
        ]
        scoring: dict[int, asyncio.Task[Group]] = {}
        try:
            done = 0
            async for completion in self.engine.generate(requests):
                own = found[completion.prompt_uid]
                own[completion.sample] = completion
                if len(own) == self.samples:
                    complete = tuple(own[i] for i in range(self.samples))
                    scoring[completion.prompt_uid] = asyncio.create_task(
                        self._scored(by_uid[completion.prompt_uid], complete)
                    )
                done += 1
                self.observer.progress("evaluate", done, len(requests), "answers")
            answered = now()
            if lost := [uid for uid in by_uid if uid not in scoring]:
                raise RuntimeError(f"the engine ended without all answers to the questions {lost}")
            groups = [await scoring[prompt.uid] for prompt in self.prompts]
        finally:
            for task in scoring.values():  # an interrupted evaluation leaves none of them behind
                task.cancel()
        if groups and getattr(
            self.rewards, "has_batch", False
        ):  # rewards that compare questions speak when all are there
            groups = list(await self.rewards.score_batch(groups))
        return groups, now() - answered

    async def _scored(self, prompt: Prompt, completions: tuple[Completion, ...]) -> Group:
        scores = await self.rewards.score(prompt, completions)
        return Group(prompt=prompt, completions=completions, scores=tuple(scores))

    async def run(self, step: int, label: str, now: Callable[[], float]) -> dict[str, Any]:
        """Evaluate, write the answers, and return the record for metrics.jsonl."""
        began = now()
        groups, scoring = await self.groups(now)
        if self.folder is not None:
            write_evals(self.folder.eval_file(step, label), step, groups)
        times = {"time": now(), "time/evaluate": now() - began, "time/score": scoring}
        return {"kind": "eval", "step": step, "label": label, **times, **summarise(groups)}


def summarise(groups: Sequence[Group]) -> dict[str, Any]:
    """The figures of a run's evaluation, flat.

    Accuracy is the share of right answers among the valid ones; a failed scorer is counted, never taken for wrong.
    `accuracy/low` and `accuracy/high` bound it with 95 % confidence: Wilson for one answer a question, bootstrap over
    the questions for several. Then there are `mean@n` and `pass@k` for powers of two as well.
    """
    pairs = [(c, s) for group in groups for c, s in zip(group.completions, group.scores, strict=True)]
    known = [bool(s.correct) for _, s in pairs if s.valid and s.correct is not None]
    values = [s.value for _, s in pairs if s.valid]
    tokens = [len(c.tokens) for c, _ in pairs]
    return {
        "accuracy": sum(known) / len(known) if known else None,
        **_estimates(groups),
        "correct": sum(known),
        "questions": len(groups),
        "answers": len(pairs),
        "invalid": sum(not s.valid for _, s in pairs),
        "reward/mean": sum(values) / len(values) if values else None,
        "length/mean": sum(tokens) / len(tokens) if tokens else None,
        "truncated_fraction": sum(c.truncated for c, _ in pairs) / len(pairs) if pairs else None,
        "tokens/generated": sum(tokens),
    }


def _estimates(groups: Sequence[Group]) -> dict[str, float]:
    """Bounds of the accuracy, and what several answers a question allow to say; nothing where no reward knows."""
    questions = [question for group in groups if (question := question_scores(group, None)).known]
    if not questions:
        return {}
    samples = max(len(question.correct) for question in questions)
    if samples == 1:
        low, high = wilson(sum(sum(question.known) for question in questions), len(questions))
        return {"accuracy/low": low, "accuracy/high": high}
    mean = bootstrap_mean([value for question in questions if (value := question.mean()) is not None])
    found = {"accuracy/low": mean.low, "accuracy/high": mean.high, f"mean@{samples}": mean.value}
    for k in powers_of_two(samples):
        passed = [value for question in questions if (value := question.passed(k)) is not None]
        if k > 1 and passed:
            found[f"pass@{k}"] = sum(passed) / len(passed)
    return found
