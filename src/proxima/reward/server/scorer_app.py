"""The HTTP app of a scorer: access checks, bounded reading of requests, scores and responses."""

import asyncio
import hmac
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, request_response

from proxima.data.flow import Completion, Group, Prompt
from proxima.model.compute_thread import ComputeThread
from proxima.reward.model_reward import ModelReward
from proxima.reward.server.bounded_server import BUSY, GONE, BoundedReader, bearer, disconnected
from proxima.reward.server.score_requests import slices, submitted_group
from proxima.reward.server.scorer_limits import ScorerLimits
from proxima.system.bounded_reading import TooLargeError, UnreadableError, parse_json

Scores = list[dict[str, Any]]


class ScorerApp:
    """The routes of a scorer.

    Args:
        reward: with `encode: text`; its weights are loaded.
        compute: the thread that scores, a slice of each request in turn, so that a long one delays no other.
        limits: see `ScorerLimits`.
        token: the bearer token that a client must send; empty: none.
        hosts: names under which clients may address the server, besides its address and the loopback names.
    """

    def __init__(
        self,
        reward: ModelReward,
        compute: ComputeThread,
        limits: ScorerLimits,
        token: str = "",
        hosts: Sequence[str] = (),
    ) -> None:
        self.reward, self.compute, self.limits, self.token = reward, compute, limits, token.encode()
        self.reader = BoundedReader(hosts, limits.body_mb << 20, limits.read_seconds)
        self.waiting = 0  # requests that wait for their scores
        self.ending = asyncio.Event()  # waiting requests are refused
        handlers: dict[Any, Any] = {HTTPException: self._refuse}
        # one route for all paths: a client without access is not told which there are
        self.asgi = Starlette(routes=[Mount("/", request_response(self._answer))], exception_handlers=handlers)

    async def _answer(self, request: Request) -> Response:
        self._admit(request)
        path, start = request.url.path, time.monotonic()
        if path != "/score" or request.method != "POST":
            why = f"{request.method} {path!a:.60} is not served; POST to /score"
            raise HTTPException(405 if path == "/score" else 404, why)
        async with self.reader.body(request, self.reader.most) as body:
            try:
                group = submitted_group(parse_json(body), self.limits)
            except (TooLargeError, UnreadableError) as error:
                what = " ".join(f"the body: {error}".split())[:200]
                raise HTTPException(413 if isinstance(error, TooLargeError) else 400, what) from None
            del body  # while its scores are computed
            scores = await self._score(request, group)
        seconds, count = time.monotonic() - start, len(scores)
        _log(request, f"200 {count} completions in {seconds:.2f} s, {count / max(seconds, 1e-3):.0f}/s")
        return JSONResponse({"scores": scores})

    def _admit(self, request: Request) -> None:
        """Raise HTTPException for a client without access, before any of its body is read."""
        self.reader.admit(request)
        sent = bearer(request).encode()
        if self.token and not hmac.compare_digest(sent, self.token):
            why = "a bearer token is required; the reward http sends that of token_env" if not sent else "wrong token"
            raise HTTPException(401, why, {"WWW-Authenticate": "Bearer"})

    async def _score(self, request: Request, group: Group) -> Scores:
        """The scores of a group, unless the client leaves or the server ends before."""
        if self.waiting >= self.limits.requests:
            raise HTTPException(503, f"{self.waiting} requests wait; the limit is --max-requests", BUSY)
        self.waiting += 1
        scored = asyncio.create_task(self._scores(group))
        gone, ending = asyncio.create_task(disconnected(request)), asyncio.create_task(self.ending.wait())
        tasks: tuple[asyncio.Task[Any], ...] = (scored, gone, ending)
        try:
            await asyncio.wait(tasks, timeout=self.limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            if scored.done():
                return scored.result()
            if gone.done():
                raise HTTPException(499, GONE)
            late = f"not scored within {self.limits.seconds:g} s, --seconds; send fewer completions"
            raise HTTPException(503, "the server is shutting down" if ending.done() else late)
        finally:
            self.waiting -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _scores(self, group: Group) -> Scores:
        run = self.compute.run
        try:  # one slice at a time: the thread takes those of other requests in between
            return [score for part in slices(group) for score in await run(self._scores_of, group.prompt, part)]
        except Exception as error:  # raised by the model: the next request may be fine
            raise HTTPException(500, " ".join(f"{type(error).__name__}: {error}".split())[:300]) from None

    def _scores_of(self, prompt: Prompt, part: Sequence[Completion]) -> Scores:
        scores: Scores = []
        for score in self.reward.score(prompt, part):
            finite = score.valid and math.isfinite(score.value)
            scores.append({"value": score.value} if finite else {"error": score.error or f"the score is {score.value}"})
        return scores

    async def _refuse(self, request: Request, refusal: HTTPException) -> Response:
        _log(request, f"{refusal.status_code} {refusal.detail}")
        return JSONResponse({"error": refusal.detail}, refusal.status_code, refusal.headers)


def _log(request: Request, text: str) -> None:
    client = request.client.host if request.client else "?"
    print(f"{time.strftime('%H:%M:%S')}  {client}  {text}", file=sys.stderr, flush=True)
