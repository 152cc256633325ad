"""Scores the requests of many clients on one thread, a slice of each in turn, so that a long one delays no other."""

import asyncio
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from proxima.data import Score
from proxima.data.columns import Floats
from proxima.model.compute_thread import ComputeThread
from proxima.reward.model_reward import ModelReward
from proxima.reward.server.score_requests import RefusedRequest, SubmittedGroup

Scores = list[list[dict[str, Any]]]


class _Turn:
    """A client's requests, with their scores so far."""

    def __init__(self, requests: Sequence[SubmittedGroup], answer: "asyncio.Future[Scores]") -> None:
        self.slices: Iterator[SubmittedGroup] = (part for request in requests for part in request.slices())
        self.scores: Scores = [[] for _ in requests]
        self.answer = answer


class FairQueue:
    """A queue whose clients take turns.

    Args:
        reward: with `encode: text`; its weights are loaded.
        compute: the thread that scores.
    """

    def __init__(self, reward: ModelReward, compute: ComputeThread) -> None:
        self.reward, self.compute = reward, compute
        self._turns: deque[_Turn] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._closed = False

    async def score(self, requests: Sequence[SubmittedGroup]) -> Scores:
        """Score the completions of each request. Cancelling drops the remaining slices.

        Raises:
            RefusedRequest: the server is shutting down.
        """
        if self._closed:
            raise RefusedRequest(503, "the server is shutting down")
        turn = _Turn(requests, asyncio.get_running_loop().create_future())
        self._turns.append(turn)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await turn.answer

    def close(self) -> None:
        """Refuse all waiting requests. The slice that is being scored still runs to its end."""
        self._closed = True
        for turn in self._turns:
            if not turn.answer.done():
                turn.answer.set_exception(RefusedRequest(503, "the server is shutting down"))

    async def _work(self) -> None:
        while self._turns:
            turn = self._turns[0]
            try:
                part = None if turn.answer.done() else next(turn.slices, None)
                if part is not None:
                    turn.scores[part.number] += await self.compute.run(self._scores, part)
            except Exception as error:
                if not turn.answer.done():
                    turn.answer.set_exception(error)
            self._turns.popleft()
            if turn.answer.done():  # scored, failed, or its client has left
                continue
            if part is None:
                turn.answer.set_result(turn.scores)
            else:
                self._turns.append(turn)

    def _scores(self, request: SubmittedGroup) -> list[dict[str, Any]]:
        scores = self.reward.score(request.prompt, request.completions)
        if not request.per_token:
            return [_json(score) for score in scores]
        values = self.reward.token_scores(request.prompt, request.completions)
        return [_json(score) | {"tokens": _finite(own)} for score, own in zip(scores, values, strict=True)]


def _json(score: Score) -> dict[str, Any]:
    if score.valid and math.isfinite(score.value):
        return {"value": score.value}
    return {"error": score.error or f"the score is {score.value}"}


def _finite(values: Floats) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
