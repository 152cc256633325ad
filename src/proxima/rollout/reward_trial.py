"""Checks before the weights are loaded that the rewards score anything at all.

Otherwise a reward that raises on every completion would end the run only after loading the weights, an evaluation and
some steps.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from typing import Any

from proxima.data import FieldError
from proxima.data.flow import Completion, Group, Prompt
from proxima.reward.base import as_reward
from proxima.reward.runner import RewardRunner
from proxima.rollout.collector import score_errors, without_score
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
    with closing(make(tried)) as rewards:
        groups = _in_thread(_tried(rewards, prompts[:PROMPTS], tokenizer))
    if without_score(groups) < len(groups):
        return []
    count, text = sum(len(group.scores) for group in groups), groups[0].completions[0].text
    facts = f"none of {count} synthetic completions such as {text!r:.60} has a score ({score_errors(groups)})"
    if not refuses:
        return [f"reward: {facts}"]
    score = "fix the reward (proxima reward score tries it)"
    remedy = f"{score}, or set runtime.reward_trial=warn if it is right to refuse such texts"
    raise FieldError("reward", ", ".join(rewards.labels), f"fails: {facts}", remedy=remedy)


def _in_thread(work: Coroutine[Any, Any, list[Group]]) -> list[Group]:
    """The result of `work` in a thread of its own, because this one may have a running event loop. A daemon thread: a
    Ctrl-C waits for no reward that hangs."""
    ended: Future[list[Group]] = Future()

    def run() -> None:
        try:
            ended.set_result(asyncio.run(work))
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name="reward-trial", daemon=True).start()
    return ended.result()


async def _tried(rewards: RewardRunner, prompts: Sequence[Prompt], tokenizer: Any) -> list[Group]:
    """Scored synthetic completions of the first prompt and, if none of them has a score, of the others, under uids that
    the run does not use."""
    groups = list[Group]()
    for some in (prompts[:1], prompts[1:]):
        unjudged = []
        for number, prompt in enumerate(some, len(groups)):
            tried = replace(prompt, uid=TRIAL_UID + number)
            right = prompt.answer[0] if isinstance(prompt.answer, list) and prompt.answer else prompt.answer
            answer = "7" if right is None else as_text(right)
            completions = tuple(_completion(tried.uid, i, text, tokenizer) for i, text in enumerate((answer, PLAIN)))
            scores = tuple(await rewards.score(tried, completions))
            unjudged.append(Group(prompt=tried, completions=completions, scores=scores))
        groups += await rewards.score_batch(unjudged)
        if without_score(groups) < len(groups):
            break
    return groups


def _completion(uid: int, sample: int, text: str, tokenizer: Any) -> Completion:
    text = utf8(text)
    tokens = tokenizer(text, add_special_tokens=False).input_ids or [tokenizer.eos_token_id]
    return Completion.of_text(uid, sample, text, tokens)
