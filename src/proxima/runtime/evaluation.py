"""Held-out evaluation: the same engine and the same rewards, on questions that training never sees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from proxima.data import Completion, Group, Prompt
from proxima.engine.protocol import Engine, Request, Sampling
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

    async def groups(self) -> list[Group]:
        """Generate and score, in the order of the questions."""
        found: dict[int, dict[int, Completion]] = {prompt.uid: {} for prompt in self.prompts}
        requests = [Request(prompt=p, sample=i, sampling=self.sampling, seed=self.seed) for p in self.prompts for i in range(self.samples)]
        done = 0
        async for completion in self.engine.generate(requests):
            found[completion.prompt_uid][completion.sample] = completion
            done += 1
            self.observer.progress("evaluate", done, len(requests), "answers")
        out = []
        for prompt in self.prompts:
            completions = tuple(found[prompt.uid][i] for i in range(self.samples))
            scores = await self.rewards.score(prompt, completions)
            out.append(Group(prompt=prompt, completions=completions, scores=tuple(scores)))
        return out

    async def run(self, step: int, label: str, now: Callable[[], float]) -> dict[str, Any]:
        """Evaluate, write the answers, and return the record for metrics.jsonl."""
        began = now()
        groups = await self.groups()
        if self.folder is not None:
            write_evals(self.folder.eval_file(step, label), step, groups)
        return {"kind": "eval", "step": step, "label": label, "time": now(), "time/evaluate": now() - began, **summarise(groups)}


def summarise(groups: Sequence[Group]) -> dict[str, Any]:
    """Accuracy is the share of right answers among the valid ones; a failed scorer is counted, never taken for wrong."""
    pairs = [(c, s) for group in groups for c, s in zip(group.completions, group.scores, strict=True)]
    known = [bool(s.correct) for _, s in pairs if s.valid and s.correct is not None]
    values = [s.value for _, s in pairs if s.valid]
    tokens = [len(c.tokens) for c, _ in pairs]
    return {
        "accuracy": sum(known) / len(known) if known else None,
        "correct": sum(known),
        "questions": len(groups),
        "answers": len(pairs),
        "invalid": sum(not s.valid for _, s in pairs),
        "reward/mean": sum(values) / len(values) if values else None,
        "length/mean": sum(tokens) / len(tokens) if tokens else None,
        "truncated_fraction": sum(c.truncated for c, _ in pairs) / len(pairs) if pairs else None,
        "tokens/generated": sum(tokens),
    }
