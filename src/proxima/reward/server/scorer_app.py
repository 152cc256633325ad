"""The HTTP app of a scorer: access checks, bounded reading of requests, and responses."""

import asyncio
import hmac
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxima.data.bounded_reading import TooLargeError, UnreadableError, parse_json, read_at_most
from proxima.data.web_requests import LOOPBACK_NAMES, refused
from proxima.reward.server.fair_queue import FairQueue, Scores
from proxima.reward.server.score_requests import RefusedRequest, SubmittedGroup, score_request, score_requests
from proxima.reward.server.scorer_limits import ScorerLimits

BUSY = {"Retry-After": "1"}
READ = "proxima.read"  # set in the scope of a request whose body is complete or no longer awaited


class ScorerApp:
    """The routes of a scorer.

    Args:
        queue: scores the completions.
        limits: see `ScorerLimits`.
        token: the bearer token that a client must send; empty: none.
        hosts: names under which clients may address the server, besides its address and the loopback names.
    """

    def __init__(self, queue: FairQueue, limits: ScorerLimits, token: str = "", hosts: Sequence[str] = ()) -> None:
        self.queue, self.limits, self.token = queue, limits, token.encode()
        self.hosts = {host.lower() for host in (*LOOPBACK_NAMES, *hosts)}
        self.held = self.waiting = 0  # bytes of unanswered requests; requests that wait for their scores
        self.asgi = Starlette(
            routes=[
                Route("/score", self._endpoint(score_request, lambda scores: {"scores": scores[0]}), methods=["POST"]),
                Route("/batch", self._endpoint(score_requests, _results), methods=["POST"]),
            ],
            exception_handlers={HTTPException: self._no_route},
        )
        self.asgi.router.redirect_slashes = False  # a redirect would answer any client, with the `Host` that it sent

    def _endpoint(
        self, parse: Callable[[Any, ScorerLimits], list[SubmittedGroup]], shape: Callable[[Scores], dict[str, Any]]
    ) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            start, count = time.monotonic(), 0
            try:
                self.admit(request)
                body: list[bytes] = []
                try:
                    content = await self._read(request, body)
                    asked = parse(content, self.limits)
                    count = sum(len(group.completions) for group in asked)
                    response = JSONResponse(shape(await self._score(request, asked)))
                finally:
                    self.held -= sum(map(len, body))
            except RefusedRequest as refusal:
                await self._discard(request)
                response = JSONResponse({"error": refusal.reason}, refusal.status, refusal.headers)
                _log(request, f"{refusal.status} {refusal.reason}")
            except ClientDisconnect:
                dropped = "" if request.scope.get(READ) else " before its request was complete"
                _log(request, f"the client left{dropped}")
                return Response(status_code=499)
            except Exception as error:  # raised by the model: the next request may be fine
                why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                response = JSONResponse({"error": why}, 500)
                _log(request, f"500 {why}")
            else:
                seconds = time.monotonic() - start
                _log(request, f"200 {count} completions in {seconds:.2f} s, {count / max(seconds, 1e-3):.0f}/s")
            return response

        return answer

    def admit(self, request: Request) -> None:
        """Raise RefusedRequest for a client without access, before any of its body is read."""
        own = (request.scope.get("server") or ("",))[0]
        if refusal := refused(request.headers, self.hosts | {own}, "start the server with --allow-host"):
            raise RefusedRequest(*refusal)
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        sent = token.strip().encode() if scheme.lower() == "bearer" else b""
        if self.token and not hmac.compare_digest(sent, self.token):
            why = "a bearer token is required; the reward http sends that of token_env" if not sent else "wrong token"
            raise RefusedRequest(401, why, {"WWW-Authenticate": "Bearer"})

    async def _read(self, request: Request, body: list[bytes]) -> Any:
        """The parsed JSON of the body, whose parts are appended to `body` as they arrive."""
        limit, seconds = self.limits.body_bytes, self.limits.read_seconds
        length, coding = (request.headers.get(name, "") for name in ("content-length", "content-encoding"))
        large = f"the body has more than {limit >> 20} MiB, --max-body-mb"
        if length.isdigit() and int(length) > limit:
            raise RefusedRequest(413, large)
        if coding not in ("", "identity"):
            raise RefusedRequest(415, f"Content-Encoding {coding!a:.40} is not read; send JSON as it is")

        async def parts() -> AsyncIterator[bytes]:
            async for part in request.stream():
                if self.held + len(part) > self.limits.held_bytes:
                    raise RefusedRequest(503, "too many bytes of other requests wait", BUSY)
                self.held += len(part)
                body.append(part)
                yield part

        try:
            async with asyncio.timeout(seconds):
                data = await read_at_most(parts(), limit)
            request.scope[READ] = True
        except TimeoutError:
            request.scope[READ] = True
            reason = f"the body was not complete after {seconds:g} s"
            raise RefusedRequest(408, reason, {"Connection": "close"}) from None
        except TooLargeError:
            raise RefusedRequest(413, large) from None
        try:
            return parse_json(data)
        except TooLargeError as error:
            raise RefusedRequest(413, f"the body has {error}") from None
        except UnreadableError as error:
            raise RefusedRequest(400, " ".join(f"the body is {error}".split())[:200]) from None

    async def _discard(self, request: Request) -> None:
        """Read what a refused client is still sending, up to a bound: while it sends, it does not read the refusal."""
        left = 0 if request.scope.get(READ) or "expect" in request.headers else 8 * self.limits.body_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.read_seconds):
                while left > 0:
                    message = await request.receive()
                    left = left - len(message["body"]) if message.get("more_body") else 0

    async def _score(self, request: Request, asked: list[SubmittedGroup]) -> Scores:
        if self.waiting >= self.limits.requests:
            raise RefusedRequest(503, f"{self.waiting} requests wait; the limit is --max-requests", BUSY)
        self.waiting += 1
        scored, gone = asyncio.create_task(self.queue.score(asked)), asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((scored, gone), timeout=self.limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            if scored.done():
                return scored.result()
            if gone.done():
                raise ClientDisconnect
            raise RefusedRequest(503, f"not scored within {self.limits.seconds:g} s, --seconds; send fewer completions")
        finally:
            self.waiting -= 1
            for task in (scored, gone):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _no_route(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        reason = f"{request.method} {request.url.path!a:.60} is not served; POST to /score or /batch"
        try:
            self.admit(request)
        except RefusedRequest as refusal:
            status, reason = refusal.status, refusal.reason
        await self._discard(request)
        _log(request, f"{status} {reason}")
        return JSONResponse({"error": reason}, status)


def _results(scores: Scores) -> dict[str, Any]:
    return {"results": [{"scores": own} for own in scores]}


async def _disconnected(request: Request) -> None:
    """Return when the client has disconnected; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _log(request: Request, text: str) -> None:
    client = request.client.host if request.client else "?"
    print(f"{time.strftime('%H:%M:%S')}  {client}  {text}", file=sys.stderr, flush=True)
