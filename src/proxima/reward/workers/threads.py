"""Daemon threads for trusted Python that may hang: a call that times out is abandoned, with its thread."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from weakref import WeakKeyDictionary

from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.reward.base import T, WeightedReward, attempted
from proxima.reward.calls import RewardCalls, checked_score, of_each, of_groups, own_scores

MOST_HUNG = 100  # abandoned threads; from then on, calls fail at once until one of these returns


class ThreadCalls(RewardCalls):
    """Makes each call of a reward in its own daemon thread, in order of arrival; a hung call keeps its thread, not its
    slot.

    Args:
        threads: simultaneous calls, of the callers in one event loop.
        timeout: seconds of a call for one completion, not counting its time in the queue, unless the reward has its
            own.
    """

    def __init__(self, reward: WeightedReward, threads: int, timeout: float) -> None:
        super().__init__(reward)
        self.timeout, self._threads, self._hung = timeout, threads, 0
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._lock = threading.Lock()

    async def group(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        size = self.reward.completions_per_call or max(1, len(completions))
        calls = [completions[start : start + size] for start in range(0, len(completions), size)]
        waiting = (self._run(partial(own_scores, self.reward, prompt, call), self.timeout) for call in calls)
        columns = zip(await asyncio.gather(*waiting), calls, strict=True)
        return [score for scores, call in columns for score in of_each(scores, call)]

    async def batch(self, groups: Sequence[Group]) -> list[list[Score]]:
        call = partial(_batch_scores, self.reward, groups)
        return of_groups(await self._run(call, self.timeout * len(groups)), groups)

    async def _run(self, function: Callable[[], T], timeout: float) -> T | Score:
        """The result of a function, or a failed score if it takes too long, too many earlier calls still hang, or no
        thread can be started."""
        seconds = self.reward.call_timeout or timeout
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._threads))
        async with slots:
            if self._hung >= MOST_HUNG:  # a scorer that always hangs must not exhaust the machine's threads
                return Score.failed(f"not called: {self._hung} earlier calls still hang")
            ended: Future[T] = Future()
            thread = threading.Thread(target=self._call, args=(function, ended), name="reward-thread", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # calls that hang have used up the machine's threads
                return Score.failed(str(error))
            try:
                return await asyncio.wait_for(asyncio.wrap_future(ended), seconds)
            except BaseException as error:
                with self._lock:
                    self._hung += ended.cancel()  # no effect if the function itself raised
                if isinstance(error, TimeoutError):
                    return Score.failed(f"timed out after {seconds:g} s")
                raise

    def _call(self, function: Callable[[], T], ended: "Future[T]") -> None:
        try:
            tell = partial(ended.set_result, function())
        except BaseException as error:
            tell = partial(ended.set_exception, error)
        with self._lock:
            if ended.cancelled():
                self._hung -= 1
            else:
                tell()


def _batch_scores(reward: WeightedReward, groups: Sequence[Group]) -> list[list[Score]] | Score:
    """The scores of a batch, or a failed score for the whole call."""
    lists = attempted(lambda: [list(scores) for scores in reward.score_batch(groups)])
    if isinstance(lists, Score):
        return lists
    if [len(scores) for scores in lists] != [len(group.scores) for group in groups]:
        returned = f"{len(lists)} lists with {sum(map(len, lists))} scores"
        expected = f"{len(groups)} lists with one score for each completion"
        return Score.failed(f"ValueError: returned {returned}, expected {expected}")
    return [[checked_score(score) for score in scores] for scores in lists]
