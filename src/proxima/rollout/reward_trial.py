"""Checks before the weights are loaded that the rewards score anything at all.

Otherwise a reward that raises on every completion would end the run only after loading the weights, an evaluation and
some steps.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from proxima.data import Completion, FieldError, Group, Prompt
from proxima.model.compute_thread import ComputeThread
from proxima.reward.base import as_reward, unscored
from proxima.reward.runner import RewardRunner
from proxima.rollout.collector import score_errors
from proxima.system.jsonl import utf8
from proxima.task.template import as_text

PROMPTS = 4  # to try: the first one, and the others only if it got no score
PLAIN = "I think that the answer is 7."
TRIAL_UID = 1 << 42  # the first uid of trial prompts, used by no draw and no record of the run


def try_rewards(
    specs: Sequence[Any],
    prompts: Sequence[Prompt],
    tokenizer: Any,
    make: Callable[[Sequence[Any]], RewardRunner],
    *,
    refuses: bool,
) -> list[str]:
    """Score two synthetic completions of a prompt, its answer and a plain sentence; if both fail, try more prompts.
    `make` makes the runner of those rewards that are tried.

    Rewards that run a model are left out, because their weights are not loaded (their `check` has passed), and so are
    rewards that need an episode.

    Returns: a warning if no completion has a score.

    Raises:
        FieldError: the same, if it `refuses` them; the message quotes the rewards' errors.
    """
    tried = [s for s in specs if as_reward(s).where != "compute" and not getattr(s, "needs_episode", False)]
    if len(tried) < len(specs):  # whole-batch rewards would miss their scores
        tried = [spec for spec in tried if not as_reward(spec).whole_batch]
    if not prompts or all(as_reward(spec).weight == 0 for spec in tried):
        return []
    with closing(make(tried)) as rewards:  # in another thread, because this one may have a running event loop
        groups = ComputeThread().serve(_tried(rewards, prompts[:PROMPTS], tokenizer))
    if _any_valid(groups):
        return []
    count, text = sum(len(group.scores) for group in groups), groups[0].completions[0].text
    facts = f"none of {count} synthetic completions such as {text!r:.60} has a score ({score_errors(groups)})"
    if not refuses:
        return [f"reward: {facts}"]
    score = "fix the reward (proxima reward score tries it)"
    remedy = f"{score}, or set runtime.reward_trial=warn if it is right to refuse such texts"
    raise FieldError("reward", ", ".join(rewards.labels), f"fails: {facts}", remedy=remedy)


async def _tried(rewards: RewardRunner, prompts: Sequence[Prompt], tokenizer: Any) -> list[Group]:
    groups = await _scored(rewards, _groups(prompts[:1], tokenizer))
    return groups if _any_valid(groups) else groups + await _scored(rewards, _groups(prompts[1:], tokenizer))


async def _scored(rewards: RewardRunner, groups: Sequence[Group]) -> list[Group]:
    scored = [replace(g, scores=tuple(await rewards.score(g.prompt, g.completions))) for g in groups]
    return await rewards.score_batch(scored)


def _any_valid(groups: Sequence[Group]) -> bool:
    return any(score.valid for group in groups for score in group.scores)


def _groups(prompts: Sequence[Prompt], tokenizer: Any) -> list[Group]:
    """Each prompt with its synthetic completions, under a uid that the run does not use."""
    groups = []
    for number, prompt in enumerate(prompts):
        answer = "7" if prompt.answer is None else as_text(prompt.answer)
        tried = replace(prompt, uid=TRIAL_UID + number)
        completions = [_completion(tried.uid, i, text, tokenizer) for i, text in enumerate((answer, PLAIN))]
        groups.append(unscored(tried, completions))
    return groups


def _completion(uid: int, sample: int, text: str, tokenizer: Any) -> Completion:
    text = utf8(text)
    tokens = tokenizer(text, add_special_tokens=False).input_ids or [tokenizer.eos_token_id]
    return Completion.of_text(uid, sample, text, tokens)
