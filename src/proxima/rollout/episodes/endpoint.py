"""The HTTP endpoint for external agents, answered by the policy of the run: OpenAI's chat completions and Responses,
and Anthropic's Messages; and `/v1/rewards`, at which an agent gives an answer a reward by its id.

Each episode has its own API key, which identifies it. The server runs in the run's event loop and listens only on the
loopback interface, unless agents come from outside. A request that it can't satisfy exactly is refused with an error in
the form of its API. The only exception is the sampling distribution, which the trainer needs to know: the sampling
settings are the run's, and `tool_choice: required` doesn't force a call, so that an agent must handle an answer without
one.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from proxima.data.columns import LARGEST
from proxima.environment.agents import ListeningAgents
from proxima.rollout.episodes.formats.chat import Answer, ApiFormat, ChatMessage, ChatRefused, ChatRequest, Count, Pay
from proxima.rollout.episodes.formats.completions import ChatCompletions, openai_error
from proxima.rollout.episodes.formats.messages import Messages
from proxima.rollout.episodes.formats.responses import Responses, chat_of
from proxima.system.bounded_reading import TooLargeError, UnreadableError, parse_json
from proxima.system.bounded_server import BoundedReader, BoundedServer, bearer, disconnected
from proxima.system.web_requests import name_in_host

T = TypeVar("T")

MOST_BYTES = 1 << 24  # maximum of a request
READ_SECONDS = 60.0  # to receive the headers of a request, and as long again for its body
IDLE_SECONDS = 600.0  # an agent thinks and uses tools between two requests
CONNECTIONS = 1 << 16
FORMATS: dict[str, ApiFormat] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/messages": Messages(),
    "/v1/responses": Responses(),
}


def unknown_key() -> ChatRefused:
    return ChatRefused("no episode has this API key, or it is over", code="invalid_api_key", status=401)


class ChatEndpoint:
    """Serves `answer` from `start` to `close`, on a free port of the loopback interface or where agents from outside
    come.

    Args:
        models: the model names that agents see and may send; answers have the first one.
        knows: true for the key of an episode; nothing is read of a request without one.
        answer: see `Answer`; it is cancelled if the agent disconnects.
        count: see `Count`.
        pay: see `Pay`.
        outside: agents from outside, with their socket and routes; None: there are none.
    """

    def __init__(
        self,
        models: Sequence[str],
        knows: Callable[[str], bool],
        answer: Answer,
        count: Count,
        pay: Pay,
        outside: ListeningAgents | None = None,
    ) -> None:
        self.models = models
        self.knows = knows
        self.answer = answer
        self.count = count
        self.pay = pay
        self._listening = None if outside is None else outside.listening
        self._reader = BoundedReader((), MOST_BYTES, READ_SECONDS, spared=1 << 20, option="")
        self._stored: dict[str, dict[str, tuple[ChatMessage, ...]]] = {}  # by key and id of a response
        self._turns: dict[str, dict[str, tuple[int, ...]]] = {}  # by key and id of an answer, one for each choice
        routes = [Route(path, partial(self._answered, form), methods=["POST"]) for path, form in FORMATS.items()]
        routes.append(Route("/v1/messages/count_tokens", self._counted, methods=["POST"]))
        routes.append(Route("/v1/models", self._models, methods=["GET"]))
        routes.append(Route("/v1/rewards", self._rewarded, methods=["POST"]))
        if outside is not None:
            routes += outside.routes()
        self._server = BoundedServer(Starlette(routes=routes), READ_SECONDS, CONNECTIONS, idle_seconds=IDLE_SECONDS)
        self._server.capture_signals = nullcontext  # type: ignore[assignment, method-assign]  # the run handles them

    async def start(self) -> None:
        """Start listening, at `address`, in the form of `OPENAI_BASE_URL`."""
        listening = self._listening or socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def close(self) -> None:
        """Stop the server and close its connections."""
        self._server.should_exit = True
        self._server.force_exit = True
        with suppress(asyncio.CancelledError):
            await self._serving

    async def _models(self, request: Request) -> Response:
        data = [{"id": model, "object": "model", "owned_by": "proxima"} for model in self.models]
        return JSONResponse({"object": "list", "data": data})

    def _key(self, request: Request) -> str:
        host = request.headers.get("Host", "")
        if not name_in_host(host):  # behind a forwarded port, it may be any name
            raise ChatRefused(f"Host {host!a:.60} is malformed")
        key = bearer(request) or request.headers.get("x-api-key", "").strip()
        if not key:
            reason = "no API key: send that of the episode as a bearer token, or as x-api-key"
            raise ChatRefused(reason, code="invalid_api_key", status=401)
        if not self.knows(key):
            raise unknown_key()
        return key

    async def _read(self, request: Request) -> Any:
        """The body of a request, as JSON."""
        try:
            async with self._reader.body(request, MOST_BYTES) as data:
                return parse_json(data)
        except HTTPException as error:
            raise ChatRefused(error.detail, status=error.status_code) from None
        except (TooLargeError, UnreadableError) as error:
            raise ChatRefused(f"the request can't be read: {error}") from None

    async def _asked(self, form: ApiFormat, request: Request) -> tuple[str, Any, ChatRequest]:
        """The key of a request, its body, and what it asks."""
        key = self._key(request)
        body = await self._read(request)
        return key, body, form.parse(body, self._stored.get(key, {}))

    async def _answered(self, form: ApiFormat, request: Request) -> Response:
        try:
            key, body, asked = await self._asked(form, request)
            answers = await unless_gone(request, self.answer(key, asked))
        except ChatRefused as refusal:
            return JSONResponse(form.error(refusal), refusal.status)
        written = form.written(body, answers, f"{key[:8]}_{time.monotonic_ns()}", self.models[0])
        turns = tuple(answer.turn for answer in answers)
        self._turns = self._of_episodes(self._turns)
        self._turns.setdefault(key, {})[written["id"]] = turns
        if isinstance(form, Responses) and body.get("store") is not False:
            chat = chat_of(body, self._stored.get(key, {}))
            self._store(key, written["id"], (*chat, answers[0].message))
        if body.get("stream"):
            return StreamingResponse(_sent(form.events(body, written)), media_type="text/event-stream")
        return JSONResponse(written)

    async def _counted(self, request: Request) -> Response:
        form = FORMATS["/v1/messages"]
        try:
            key, _, asked = await self._asked(form, request)
            return JSONResponse({"input_tokens": await self.count(key, asked)})
        except ChatRefused as refusal:
            return JSONResponse(form.error(refusal), refusal.status)

    async def _rewarded(self, request: Request) -> Response:
        try:
            key = self._key(request)
            given = read_reward(await self._read(request))
            turns = self._turns.get(key, {}).get(given.answer)
            if turns is None:
                what = f"id={given.answer!a:.80}: no answer of this episode has it, or it is of an earlier attempt"
                raise ChatRefused(what, code="unknown_id", status=404)
            if given.index >= len(turns):
                raise ChatRefused(f"index={given.index}: the answer has {len(turns)}, numbered from 0")
            self.pay(key, turns[given.index], given.reward)
        except ChatRefused as refusal:
            return JSONResponse(openai_error(refusal), refusal.status)
        return JSONResponse({"id": given.answer, "index": given.index, "reward": given.reward})

    def _of_episodes(self, by_key: dict[str, T]) -> dict[str, T]:
        """What is kept for the episodes that are still played."""
        return {key: kept for key, kept in by_key.items() if self.knows(key)}

    def _store(self, key: str, name: str, chat: tuple[ChatMessage, ...]) -> None:
        """Keep the chat up to a response, until its episode ends."""
        self._stored = self._of_episodes(self._stored)
        self._stored.setdefault(key, {})[name] = chat


@dataclass(frozen=True)
class GivenReward:
    """A reward for one choice of an answer: the answer's id, the choice's index, and reward units."""

    answer: str
    index: int
    reward: float


def read_reward(body: object) -> GivenReward:
    """Read the body of a request to `/v1/rewards`; ChatRefused names a field that is wrong."""
    if not isinstance(body, dict):
        raise ChatRefused("the request must be a JSON object with id and reward")
    unknown = sorted(map(str, body.keys() - {"id", "reward", "index"}))
    if unknown:
        raise ChatRefused(f"{unknown[0]!a:.80} is unknown; a reward has id, reward and index")
    answer = body.get("id")
    index = body.get("index", 0)
    reward = body.get("reward")
    if not isinstance(answer, str):
        raise ChatRefused(f"id={answer!a:.80}: must be the id of an answer, a text")
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise ChatRefused(f"index={index!a:.80}: must be the number of a choice, from 0")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= LARGEST:
        raise ChatRefused(f"reward={reward!a:.80}: must be a finite number")
    return GivenReward(answer, index, float(reward))


async def _sent(events: Iterable[str]) -> AsyncIterator[str]:
    """The events of an answer, which is complete before the first one: only then are its calls known."""
    for each in events:
        yield each


async def unless_gone(request: Request, answer: Awaitable[T]) -> T:
    """Await the answer; cancel it if the client disconnects first."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.create_task(disconnected(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ChatRefused("the client disconnected", status=499)
        return work.result()
    finally:
        work.cancel()
        gone.cancel()
