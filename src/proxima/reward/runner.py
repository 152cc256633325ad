"""Runs a list of rewards over a prompt's completions and sums their values."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from proxima.data import UserError, require
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.model.compute_thread import ComputeThread
from proxima.reward.base import NOT_APPLICABLE, WeightedReward, as_reward
from proxima.reward.calls import RewardCalls, ThreadCalls, WorkerCalls, make_pools
from proxima.reward.workers.pool import WorkerPool

LARGEST = 1e12  # a gradient scaled by this still has a finite square in float32


class RewardRunner:
    """Scores completions by a weighted list of rewards; a failure invalidates only the completions of the failed call.

        value = sum over rewards of weight * part      correct: from the first reward, in the order given, that sets it

    `score` scores a group as soon as it is complete, without the rewards of the whole batch. `score_batch`, called once
    per generated batch, adds these to the groups that `score` has scored.

    Args:
        rewards: the specs, at least one.
        timeout: seconds that a call of a reward may take, times the number of groups for a whole batch; > 0. A
            reward's `call_timeout` or a job's own limit takes precedence.
        workers: worker processes of each kind in use, and threads for rewards that run in threads; >= 1.
        memory_mb: memory limit, in MiB, of a worker that calls functions; 0: none.
        compute: the thread of the tensor work, for rewards that run a model; None: separate threads.
        pool: class of the worker pools; None: processes on this machine.

    Raises:
        UserError: there are no rewards, one is not a `WeightedReward`, or two have the same name.

    A failure is an exception, a timeout, a value that is not finite, a sum beyond ±1e12, or a worker that died. It
    gives `valid=False` with `error="<name>: <why>"`, and `parts` contains the values of the other rewards. The failure
    of a reward of weight 0 has no effect. A completion to which no reward of nonzero weight applies (`NOT_APPLICABLE`)
    also gets `valid=False`.

    At most `workers` calls of a reward (or its own `concurrency`) run at once, however many completions wait. While 100
    calls of a reward hang, it is not called, and its scores are invalid at once.
    """

    def __init__(
        self,
        rewards: Sequence[Any],
        timeout: float = 10.0,
        workers: int = 1,
        memory_mb: int = 0,
        compute: ComputeThread | None = None,
        pool: type[WorkerPool] | None = None,
    ) -> None:
        require(len(rewards) >= 1, "reward", list(rewards), "must hold at least one reward")
        require(timeout > 0, "timeout", timeout, "must be > 0 seconds")
        require(workers >= 1, "workers", workers, "must be >= 1")
        self.rewards: tuple[WeightedReward, ...] = tuple(map(as_reward, rewards))
        self.timeout = timeout
        self.compute = compute
        self.labels = tuple(reward.label for reward in self.rewards)
        for label in self.labels:
            unique = self.labels.count(label) == 1
            require(unique, "reward", label, "is the name of two rewards; give one of them another `name`")
        self._pools: dict[str, WorkerPool] = {}
        if any(reward.where in ("text", "function") for reward in self.rewards):
            self._pools = make_pools(self.rewards, workers, timeout, memory_mb, pool)
        self._calls = [self._calls_of(reward, workers) for reward in self.rewards]
        self.awaited: dict[str, list[int]] = {label: [] for label in self.labels}  # prompts of the running calls

    def _calls_of(self, reward: WeightedReward, workers: int) -> RewardCalls:
        if reward.pool in self._pools:
            return WorkerCalls(reward, self._pools[reward.pool], self.timeout)
        at_once = reward.where == "inline" and reward.completions_per_call == 1
        in_compute = reward.where == "compute" and self.compute is not None
        if (at_once or in_compute) and not reward.whole_batch:
            compute = self.compute if in_compute else None
            return RewardCalls(reward, compute)

        return ThreadCalls(reward, reward.concurrency or workers, self.timeout)

    @property
    def has_batch(self) -> bool:
        """True if a reward compares the whole batch, so that `score_batch` adds something."""
        return any(reward.whole_batch for reward in self.rewards)

    @property
    def _batch_counts(self) -> bool:
        """True if `score_batch` changes values, and does not only add parts that are logged."""
        return any(reward.whole_batch and reward.weight != 0 for reward in self.rewards)

    @property
    def comparing(self) -> list[str]:
        """The names of the rewards of nonzero weight that compare with the row's answer."""
        return [reward.label for reward in self.rewards if reward.weight != 0 and reward.needs_answer]

    def check(self) -> None:
        """Run `check` of every reward of nonzero weight, and start the containers of their workers; errors name the
        reward."""
        for reward in self.rewards:
            if reward.weight != 0:
                with _named(reward.label):
                    reward.check()
                    if reward.pool in self._pools:
                        self._pools[reward.pool].check()

    def notes(self) -> list[str]:
        """Lines of the rewards for the user at the start of a run, each once."""
        notes: dict[str, None] = {}
        for reward in self.rewards:
            notes |= dict.fromkeys(reward.notes())
        return list(notes)

    def unreadable(self, answers: Sequence[Any]) -> list[str | None]:
        """For each row's answer, the reason why a reward of nonzero weight can't score that row, or None; blocks.

        Each distinct answer is checked once, in parallel by the workers if one is needed.
        """
        keys = [json.dumps(answer, sort_keys=True, default=repr) for answer in answers]
        distinct = dict(zip(keys, answers, strict=True))
        reasons: dict[str, str | None] = {}
        for reward, calls in zip(self.rewards, self._calls, strict=True):
            if reward.weight != 0 and reward.needs_answer:
                for key, why in zip(distinct, calls.unreadable(list(distinct.values())), strict=True):
                    if why is not None:
                        reasons.setdefault(key, f"{reward.label}: {why}")
        return [reasons.get(key) for key in keys]

    def keep_in(self, folder: Path) -> None:
        """Tell the rewards the folder of the run, before the first `score`; see `WeightedReward.keep_in`."""
        for reward in self.rewards:
            reward.keep_in(folder)

    def start(self) -> None:
        """Start the worker processes and load the models; otherwise the first `score` does both.

        Raises:
            UserError: a model can't be loaded.
        """
        for reward in self.rewards:
            if reward.where == "compute":
                with _named(reward.label):
                    (self.compute or ComputeThread()).call(reward.load)
        for pool in self._pools.values():
            pool.start()

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """One score per completion, in the same order. A failed episode is invalid and passed to no reward."""
        playable = [completion for completion in completions if not _failure(completion)]
        if len(playable) < len(completions):
            scores: Iterator[Score] = iter(())
            if playable:
                scores = iter(await self.score(prompt, playable))
            whys = map(_failure, completions)
            return [Score.failed(why) if why else next(scores) for why in whys]
        columns = await self._columns(False, [prompt.uid], lambda i: self._calls[i].group(prompt, completions))
        before = Score(value=0.0)
        last = not self._batch_counts
        added = [{i: column[at] for i, column in columns.items()} for at in range(len(completions))]
        return [self._add(before, scores, last) for scores in added]

    async def score_batch(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with the values of the whole-batch rewards added to each score; unchanged if there are none.

        Such a value is weighted and added like any other part; if it failed, the completion becomes invalid. An invalid
        completion stays invalid. `correct` is kept where it is known.
        """
        if not groups:
            return []
        uids = [group.prompt.uid for group in groups]
        columns = await self._columns(True, uids, lambda i: self._calls[i].batch(groups))
        if not columns:
            return list(groups)
        scored = []
        for g, group in enumerate(groups):
            added = [{i: column[g][at] for i, column in columns.items()} for at in range(len(group.scores))]
            scores = map(partial(self._add, last=self._batch_counts), group.scores, added)
            scored.append(replace(group, scores=tuple(scores)))
        return scored

    def close(self) -> None:
        """Stop the workers. A reward that hangs in a thread is abandoned; it can't keep the process alive."""
        for pool in self._pools.values():
            pool.close()

    async def _columns(self, whole_batch: bool, uids: list[int], column: Callable[[int], Any]) -> dict[int, Any]:
        """The results, by index, of all rewards that compare the whole batch, or of all other rewards."""
        members = [i for i, reward in enumerate(self.rewards) if reward.whole_batch == whole_batch]

        async def awaited(i: int) -> Any:
            waiting = self.awaited[self.labels[i]]
            waiting += uids
            try:
                return await column(i)
            finally:
                for uid in uids:
                    waiting.remove(uid)

        return dict(zip(members, await asyncio.gather(*map(awaited, members)), strict=True))

    def _add(self, before: Score, added: dict[int, Score], last: bool) -> Score:
        """Add the scores of more rewards, by index, to a score and to those of its players; `last` if no reward of
        nonzero weight follows."""
        names = dict.fromkeys(before.players)
        for score in added.values():
            names |= dict.fromkeys(score.players)
        players = {}
        for name in names:
            own = {i: score.players.get(name, score) for i, score in added.items()}
            players[name] = self._sum(before.players.get(name, before), own, last)
        return replace(self._sum(before, added, last), players=players)

    def _sum(self, before: Score, added: dict[int, Score], last: bool) -> Score:
        parts = dict(before.parts)
        errors = []
        if not before.valid:
            errors.append(before.error or "no score")
        value = before.value
        correct = before.correct
        for i, score in added.items():
            label = self.labels[i]
            weight = self.rewards[i].weight
            if score is NOT_APPLICABLE:
                continue
            if score.valid:
                parts[label] = score.value
                parts.update({f"{label}/{key}": part for key, part in score.parts.items()})
            if score.valid and weight != 0:
                value += weight * score.value
            elif weight != 0:
                errors.append(f"{label}: {score.error}")
            if correct is None:
                correct = score.correct
        counting = [reward.label for reward in self.rewards if reward.weight != 0]
        if last and counting and not errors and parts.keys().isdisjoint(counting):
            errors.append("no reward applies to this row")
        if not errors and not abs(value) <= LARGEST:
            errors = [f"the weighted sum of the rewards is {value:g}, expected a number within ±{LARGEST:g}"]
        if errors:  # they may quote model output, and are printed to a terminal
            text = "; ".join(errors)
            printable = [char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text]
            return replace(Score.failed("".join(printable)), parts=parts, correct=correct)
        return Score(value=value, parts=parts, correct=correct)


def _failure(completion: Completion) -> str | None:
    """The reason why the completion's episode failed; empty or None if it did not."""
    if completion.episode is None:
        return None
    return completion.episode.failure


@contextmanager
def _named(label: str) -> Iterator[None]:
    """Name the reward in errors that are raised inside."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"reward '{label}': {error}") from None
