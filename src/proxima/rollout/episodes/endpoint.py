"""The HTTP endpoint for external agents: OpenAI's chat completions API, answered by the policy of the run.

Each episode has its own API key, which identifies it. The server runs in the run's event loop and listens only on the
loopback interface. A request that it can't satisfy exactly is refused with an error in OpenAI's format. The only
exception is the sampling distribution, which the trainer needs to know: the sampling settings are the run's, and
`tool_choice: required` doesn't force a call, so that an agent must handle an answer without one.
"""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from proxima.data.episode import ToolCall
from proxima.data.json_reader import load_json
from proxima.environment.interface import tool_problem
from proxima.reward.server.bounded_server import BoundedReader, BoundedServer, bearer, disconnected
from proxima.system.bounded_reading import TooLargeError, UnreadableError, parse_json
from proxima.system.web_requests import name_in_host

MOST_BYTES = 1 << 24  # maximum of a request
READ_SECONDS = 60.0  # to receive the headers of a request, and as long again for its body
IDLE_SECONDS, CONNECTIONS = 600.0, 1 << 16  # an agent thinks and uses tools between two requests
MOST_STOPS = 64
ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Unsupported fields that would change the answer, each with the values that change nothing.
NOT_DONE: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none", "required"),
    "functions": (),
    "function_call": (),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
}
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """An agent's request.

    Args:
        messages: each with a role and content; the assistant's also with `calls`.
        tools: schemas of the tools that the model may call.
        max_tokens: limit of the answer; None: the run's limit.
        stop: texts that end the answer.
        model: the name that the agent sent; empty: none.
    """

    messages: tuple["ChatMessage", ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    model: str = ""


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    """A message as an agent sends it."""

    role: str
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChatAnswer:
    """The model's message: its content without the calls, and the calls by id."""

    content: str
    calls: Mapping[str, ToolCall] = field(default_factory=dict)
    finish_reason: FinishReason = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ChatRefused(Exception):
    """A refused request: OpenAI's status and code, and a message of one line."""

    def __init__(self, message: str, *, code: str = "invalid_request_error", status: int = 400) -> None:
        super().__init__(message)
        self.message, self.code, self.status = message, code, status

    def response(self) -> JSONResponse:
        error = {"message": self.message, "type": "invalid_request_error", "code": self.code, "param": None}
        return JSONResponse({"error": error}, self.status)


def unknown_key() -> ChatRefused:
    return ChatRefused("no episode has this API key, or it is over", code="invalid_api_key", status=401)


Answer = Callable[[str, ChatRequest], Awaitable[ChatAnswer]]  # by the episode with this key; may raise ChatRefused


class ChatEndpoint:
    """Serves `answer` on a free port of the loopback interface from `start` to `close`.

    Args:
        models: the model names that agents see and may send; answers have the first one.
        knows: true for the key of an episode; nothing is read of a request without one.
        answer: see `Answer`; it is cancelled if the agent disconnects.
    """

    def __init__(self, models: Sequence[str], knows: Callable[[str], bool], answer: Answer) -> None:
        self.models, self.knows, self.answer = models, knows, answer
        self._reader = BoundedReader((), MOST_BYTES, READ_SECONDS, spared=1 << 20, option="")
        routes = [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]
        self._server = BoundedServer(Starlette(routes=routes), READ_SECONDS, CONNECTIONS, idle_seconds=IDLE_SECONDS)
        self._server.capture_signals = nullcontext  # type: ignore[assignment, method-assign]  # the run handles them

    async def start(self) -> None:
        """Start listening, at `address`, in the form of `OPENAI_BASE_URL`."""
        listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def close(self) -> None:
        """Stop the server and close its connections."""
        self._server.should_exit = self._server.force_exit = True
        with suppress(asyncio.CancelledError):
            await self._serving

    async def _models(self, request: Request) -> Response:
        data = [{"id": model, "object": "model", "owned_by": "proxima"} for model in self.models]
        return JSONResponse({"object": "list", "data": data})

    def _key(self, request: Request) -> str:
        if not name_in_host(host := request.headers.get("Host", "")):  # behind a forwarded port, it may be any name
            raise ChatRefused(f"Host {host!a:.60} is malformed")
        if not (key := bearer(request)):
            reason = "no API key: send that of the episode as a bearer token"
            raise ChatRefused(reason, code="invalid_api_key", status=401)
        if not self.knows(key):
            raise unknown_key()
        return key

    async def _read(self, request: Request) -> tuple[dict[str, Any], ChatRequest]:
        """The body of a request, as JSON and as a chat."""
        try:
            async with self._reader.body(request, MOST_BYTES) as data:
                body = parse_json(data)
                return body, chat_request(body)
        except HTTPException as error:
            raise ChatRefused(error.detail, status=error.status_code) from None
        except (TooLargeError, UnreadableError) as error:
            raise ChatRefused(f"the request can't be read: {error}") from None

    async def _complete(self, request: Request) -> Response:
        try:
            key = self._key(request)
            body, chat = await self._read(request)
            answer = await _unless_gone(request, self.answer(key, chat))
        except ChatRefused as refusal:
            return refusal.response()
        name = f"chatcmpl-{key[:8]}-{time.monotonic_ns()}"
        common = {"id": name, "created": int(time.time()), "model": self.models[0]}
        if not body.get("stream"):
            return JSONResponse(_completion(common, answer))
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return StreamingResponse(_events(common, answer, usage), media_type="text/event-stream")


async def _unless_gone(request: Request, answer: Awaitable[ChatAnswer]) -> ChatAnswer:
    """Await the answer; cancel it if the client disconnects first."""
    work, gone = asyncio.ensure_future(answer), asyncio.create_task(disconnected(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ChatRefused("the client disconnected", status=499)
        return work.result()
    finally:
        work.cancel()
        gone.cancel()


def chat_request(body: Any) -> ChatRequest:
    """Parse a JSON body. ChatRefused names the field that is invalid or unsupported."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ChatRefused("the request has a lone surrogate, which is not text") from None
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise ChatRefused("messages: must be a list of at least one message")
    for name, harmless in NOT_DONE.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise ChatRefused(f"{name}={json.dumps(value)[:60]}: not supported; leave it out", code="unsupported_value")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise ChatRefused("stream_options: must be an object")
    most = body.get("max_completion_tokens", body.get("max_tokens"))
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise ChatRefused(f"max_tokens={most!r:.60}: must be a whole number >= 1")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise ChatRefused("stop: must be a text, or a list of texts that are not empty")
    if len(stop) > MOST_STOPS:
        raise ChatRefused(f"stop: has {len(stop):,} texts; send at most {MOST_STOPS}")
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise ChatRefused('tools: must be a list of {"type": "function", "function": {"name": …, "parameters": …}}')
    for i, tool in enumerate(tools):
        if problem := tool_problem(tool, f"tools.{i}"):
            raise ChatRefused(problem)
    tools = [] if body.get("tool_choice") == "none" else tools
    messages = tuple(_message(i, message) for i, message in enumerate(body["messages"]))
    model = body["model"] if isinstance(body.get("model"), str) else ""
    return ChatRequest(messages=messages, tools=tuple(tools), max_tokens=most, stop=tuple(stop), model=model)


def _message(index: int, message: Any) -> ChatMessage:
    where = f"messages.{index}"
    if not isinstance(message, dict) or str(message.get("role")) not in ROLES:
        raise ChatRefused(f"{where}: must have a role of {', '.join(ROLES)}")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ChatRefused(f"{where}.tool_calls: must be a list")
    return ChatMessage(
        role=ROLES[message["role"]],
        content=_text(where, message.get("content")),
        calls=tuple(_call(where, call) for call in calls),
    )


def _text(where: str, content: Any) -> str:
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise ChatRefused(f"{where}.content: must be a text, or parts of type text")
    return content or ""


def _call(where: str, call: Any) -> ToolCall:
    try:
        name, written = call["function"]["name"], call["function"]["arguments"]
        arguments = load_json(written or "{}")
        json.dumps(arguments, ensure_ascii=False).encode()
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ChatRefused(f"{where}.tool_calls: can't be read") from None
    if not (isinstance(name, str) and isinstance(arguments, dict)):
        raise ChatRefused(f"{where}.tool_calls: must have a name, and arguments that are the JSON of an object")
    return ToolCall(name=name, arguments=arguments)


def _calls(answer: ChatAnswer) -> list[dict[str, Any]]:
    return [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))}}
        for name, call in answer.calls.items()
    ]


def _usage(answer: ChatAnswer) -> dict[str, int]:
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _completion(common: Mapping[str, Any], answer: ChatAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or (None if answer.calls else "")}
    if answer.calls:
        message["tool_calls"] = _calls(answer)
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
    return {**common, "object": "chat.completion", "choices": [choice], "usage": _usage(answer)}


async def _events(common: Mapping[str, Any], answer: ChatAnswer, usage: bool) -> AsyncIterator[str]:
    """Stream the answer; it is complete before the first event, because its calls are only known then."""
    delta: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.calls:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(_calls(answer))]
    for part, reason in ((delta, None), ({}, answer.finish_reason)):
        choice = {"index": 0, "delta": part, "finish_reason": reason, "logprobs": None}
        yield _event({**common, "object": "chat.completion.chunk", "choices": [choice]})
    if usage:
        yield _event({**common, "object": "chat.completion.chunk", "choices": [], "usage": _usage(answer)})
    yield "data: [DONE]\n\n"


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
