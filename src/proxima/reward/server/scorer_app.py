"""The HTTP app of a scorer: access checks, bounded reading and validation of requests, scores and responses."""

import asyncio
import hmac
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, request_response

from proxima.data.errors import suggestion
from proxima.data.flow import Completion, FinishReason, Group, Prompt
from proxima.model.compute_thread import ComputeThread
from proxima.reward.base import unscored
from proxima.reward.model_reward import ModelReward
from proxima.reward.server.scorer_limits import ScorerLimits
from proxima.system.bounded_reading import TooLargeError, UnreadableError, parse_json
from proxima.system.bounded_server import BUSY, GONE, BoundedReader, bearer, disconnected
from proxima.system.jsonl import utf8

SLICE_CHARACTERS = 32_768  # about a forward pass of ModelReward.tokens_per_forward
SLICE_COMPLETIONS = 64


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
        self.reward = reward
        self.compute = compute
        self.limits = limits
        self.token = token.encode()
        self.reader = BoundedReader(hosts, limits.body_mb << 20, limits.read_seconds)
        self.waiting = 0  # requests that wait for their scores
        self.ending = asyncio.Event()  # waiting requests are refused
        handlers: dict[Any, Any] = {HTTPException: self._refuse}
        # one route for all paths: a client without access is not told which there are
        self.asgi = Starlette(routes=[Mount("/", request_response(self._answer))], exception_handlers=handlers)

    async def _answer(self, request: Request) -> Response:
        self._admit(request)
        path = request.url.path
        start = time.monotonic()
        if path != "/score" or request.method != "POST":
            status = 405 if path == "/score" else 404
            raise HTTPException(status, f"{request.method} {path!a:.60} is not served; POST to /score")
        async with self.reader.body(request, self.reader.most) as body:
            try:
                group = submitted_group(parse_json(body), self.limits)
            except (TooLargeError, UnreadableError) as error:
                status = 413 if isinstance(error, TooLargeError) else 400
                what = " ".join(f"the body: {error}".split())[:200]
                raise HTTPException(status, what) from None
            del body  # while its scores are computed
            scores = await self._score(request, group)
        seconds = time.monotonic() - start
        count = len(scores)
        _log(request, f"200 {count} completions in {seconds:.2f} s, {count / max(seconds, 1e-3):.0f}/s")
        return JSONResponse({"scores": scores})

    def _admit(self, request: Request) -> None:
        """Raise HTTPException for a client without access, before any of its body is read."""
        self.reader.admit(request)
        sent = bearer(request).encode()
        if self.token and not hmac.compare_digest(sent, self.token):
            if not sent:
                why = "a bearer token is required; the reward http sends that of token_env"
            else:
                why = "wrong token"
            raise HTTPException(401, why, {"WWW-Authenticate": "Bearer"})

    async def _score(self, request: Request, group: Group) -> Scores:
        """The scores of a group, unless the client leaves or the server ends before."""
        if self.waiting >= self.limits.requests:
            raise HTTPException(503, f"{self.waiting} requests wait; the limit is --max-requests", BUSY)
        self.waiting += 1
        scored = asyncio.create_task(self._scores(group))
        gone = asyncio.create_task(disconnected(request))
        ending = asyncio.create_task(self.ending.wait())
        tasks: tuple[asyncio.Task[Any], ...] = (scored, gone, ending)
        try:
            await asyncio.wait(tasks, timeout=self.limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            if scored.done():
                return scored.result()
            if gone.done():
                raise HTTPException(499, GONE)
            if ending.done():
                raise HTTPException(503, "the server is shutting down")
            late = f"not scored within {self.limits.seconds:g} s, --seconds; send fewer completions"
            raise HTTPException(503, late)
        finally:
            self.waiting -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _scores(self, group: Group) -> Scores:
        scores: Scores = []
        try:
            for part in slices(group):  # one at a time: the thread takes those of other requests in between
                scores += await self.compute.run(self._scores_of, group.prompt, part)
        except Exception as error:  # raised by the model: the next request may be fine
            raise HTTPException(500, " ".join(f"{type(error).__name__}: {error}".split())[:300]) from None
        return scores

    def _scores_of(self, prompt: Prompt, part: Sequence[Completion]) -> Scores:
        scores: Scores = []
        for score in self.reward.score(prompt, part):
            if score.valid and math.isfinite(score.value):
                scores.append({"value": score.value})
            else:
                scores.append({"error": score.error or f"the score is {score.value}"})
        return scores

    async def _refuse(self, request: Request, refusal: HTTPException) -> Response:
        _log(request, f"{refusal.status_code} {refusal.detail}")
        return JSONResponse({"error": refusal.detail}, refusal.status_code, refusal.headers)


def slices(group: Group) -> Iterator[Sequence[Completion]]:
    """Split the completions of a group into parts of bounded work."""
    prompt_characters = sum(len(message["content"]) for message in group.prompt.messages)
    start = 0
    size = prompt_characters
    for end, completion in enumerate(group.completions):
        size += len(completion.text)
        if end > start and (size > SLICE_CHARACTERS or end - start == SLICE_COMPLETIONS):
            yield group.completions[start:end]
            start = end
            size = prompt_characters + len(completion.text)
    if group.completions:
        yield group.completions[start:]


# The form of a value: fields of an object, elements of a list, some words, or a type: `object` for what no model reads.
PROMPT = {
    "uid": object,
    "messages": [{"role": ("system", "user", "assistant"), "content": str}],
    "answer": object,
    "metadata": object,
}
COMPLETION = {"sample": object, "text": str, "tokens": object, "finish_reason": (*get_args(FinishReason), None)}
SCORE = {"completions": [COMPLETION], "prompt": object}
NAMES: dict[Any, str] = {dict: "an object", list: "a list", str: "text"}


def submitted_group(given: Any, limits: ScorerLimits) -> Group:
    """Parse a request, field by field, guessing nothing; HTTPException names the invalid field."""
    _require(given, SCORE, "")
    prompt = given.get("prompt")
    completions = given["completions"]
    messages = []
    if len(completions) > limits.completions:
        limit = f"the limit is {limits.completions:,}, --max-completions"
        raise HTTPException(413, f"{len(completions):,} completions; {limit}")
    if prompt is not None or completions:  # else a health check
        _require(prompt, PROMPT, "prompt")
        messages = prompt["messages"]
        if not messages:
            raise HTTPException(400, "prompt.messages=[] must be at least one {role, content}")
    lengths = {"prompt": sum(len(message["content"]) for message in messages)}
    lengths |= {f"completions[{i}].text": len(c["text"]) for i, c in enumerate(completions)}
    for name, length in lengths.items():
        if length > limits.characters:
            raise HTTPException(413, f"{name}: {length:,} characters; the limit is {limits.characters:,}")
    texts = tuple({"role": message["role"], "content": utf8(message["content"])} for message in messages)
    reasons: list[FinishReason] = [completion.get("finish_reason") or "stop" for completion in completions]
    made = [Completion.of_text(0, i, utf8(c["text"]), finish_reason=reasons[i]) for i, c in enumerate(completions)]
    return unscored(Prompt(uid=0, messages=texts, tokens=np.zeros(0, np.int32)), made)


def _require(value: object, form: object, place: str) -> None:
    """Raise HTTPException, which names the field at `place` (empty: the request), unless the value has the form."""
    if isinstance(form, tuple):
        if value not in form:
            raise _unfit(value, place, f"one of {', '.join(filter(None, form))}")
        return
    kind: Any = type(form) if isinstance(form, dict | list) else form
    if not isinstance(value, kind):
        raise _unfit(value, place, NAMES[kind])
    if isinstance(form, list):
        for i, entry in enumerate(value):
            _require(entry, form[0], f"{place}[{i}]")
    elif isinstance(form, dict):
        above = f"{place}." if place else ""
        for key in value:
            if key not in form:
                raise HTTPException(400, f"unknown field {above}{key:.60}; {suggestion(key[:60], form)}")
        for key, inner in form.items():
            _require(value.get(key), inner, above + key)


def _unfit(value: object, place: str, expected: str) -> HTTPException:
    return HTTPException(400, f"{place or 'the request'}={json.dumps(value)[:48]} must be {expected}")


def _log(request: Request, text: str) -> None:
    client = request.client.host if request.client else "?"
    print(f"{time.strftime('%H:%M:%S')}  {client}  {text}", file=sys.stderr, flush=True)
