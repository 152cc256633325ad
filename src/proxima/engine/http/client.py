"""HTTP client of one address: JSON calls with a deadline, and streams. Errors name the server; proxies and redirects
are refused."""

import asyncio
import os
import re
import ssl
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import httpx

from proxima.data import UserError, require
from proxima.data.random import BUSY_SERVER, mix
from proxima.engine.http.answer_values import error_message, missing, one_line
from proxima.engine.protocol import ServerError
from proxima.system.bounded_reading import IDENTITY, TooLargeError, UnreadableError, parse_json, read_body, stream_lines
from proxima.system.http_clients import async_http_client
from proxima.system.secret_values import HIDDEN, is_secret_value
from proxima.system.web_requests import is_loopback

# Servers close a connection that has been idle for five seconds; a call sent at that moment may be lost.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
LEAST_SECONDS = 1.0  # for a call that is made when a deadline has almost passed
ANSWER = 4 << 20  # most bytes of a response whose size does not depend on the request: a server's facts and state
ERROR = 64 << 10  # bytes of an error's body that are read
TOKEN, SET = 2 << 10, 16  # most bytes per token, and per id of a sampling mask
EVENT = 16 << 10  # most bytes of an event with one token and all its data
OK = 200  # the status of a response that was to be JSON and is not
SHORTEST_BREAK, LONGEST_BREAK = 0.5, 60.0  # seconds to wait before retrying a busy server


class RefusedError(UserError):
    """Status 401 or 403, a rejected key: this server would refuse every other call too; other servers may accept their
    keys."""


@dataclass(frozen=True)
class Address:
    """The address of a server and how to authenticate with it.

    Args:
        url: `http://` or `https://`, no path.
        token_env: environment variable with a bearer token; None: no `Authorization`. The token is never written
            anywhere.
        allow_remote: the address may be on another machine: prompts, completions and weights are sent there, and
            whoever answers decides what is trained on.
        token: the bearer token itself, for a server that this process has started.

    Raises:
        FieldError: an invalid address, a variable that is not set, or another machine without `allow_remote` and token.
    """

    url: str
    token_env: str | None = None
    allow_remote: bool = False
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            numbered = parts.port != 0
        except ValueError:  # an invalid port or host
            numbered = False
        require(numbered, "url", self.url, "must be http://HOST:PORT, the port in 1..65535")
        bare = not parts.path.strip("/") and not parts.query
        plain = parts.scheme in ("http", "https") and parts.hostname and bare
        require("@" not in parts.netloc, "url", HIDDEN, "must hold no password; give its variable in token_env")
        displayed = HIDDEN if "?" in self.url else self.url  # a query may hold a key
        require(bool(plain), "url", displayed, "must be http://HOST:PORT without a path")
        if self.token_env is not None:
            token = os.environ.get(self.token_env, "")
            displayed = HIDDEN if is_secret_value(self.token_env) else self.token_env  # perhaps the key itself
            require(bool(token), "token_env", displayed, "must name an environment variable that is set")
            sound = token.isascii() and token.isprintable() and " " not in token
            require(sound, "token_env", self.token_env, "holds a space, a line break or a sign that no key has")
        if not is_loopback(parts.hostname or ""):
            allowed = self.allow_remote and self.token_env is not None
            reason = "is on another machine: set allow_remote=true and token_env, the variable with the server's key"
            require(allowed, "url", self.url, reason)

    @property
    def key(self) -> str | None:
        """The bearer token, if there is one."""
        if self.token_env is None:
            return self.token
        return os.environ[self.token_env]


class Deadline:
    """One deadline for several calls.

    Args:
        seconds: which all of them may take together, from now.
    """

    def __init__(self, seconds: float) -> None:
        self._end = monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds for the next call: > 0, so that it is made, and fails by its own deadline."""
        return max(LEAST_SECONDS, self._end - monotonic())


@dataclass(frozen=True)
class StreamSize:
    """Size limits of a stream.

    Args:
        line, total: most bytes of one line, and of the whole stream.
    """

    line: int
    total: int


class ServerClient:
    """Calls to one server. Belongs to the event loop that first uses it. No response may be larger than the request can
    justify, compressed or not; `proxima.system.bounded_reading` enforces this.

    Args:
        address: of the server.
        seconds: default deadline of a call.
    """

    def __init__(self, address: Address, *, seconds: float = 60.0) -> None:
        self.url = address.url.rstrip("/")
        self.seconds = seconds
        self._key = address.key
        headers = dict(IDENTITY)
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        # An engine ignores the environment's proxies: they would see every prompt, and buffer the streams.
        self._http = async_http_client(
            self.url, base_url=self.url, headers=headers, limits=LIMITS, verify=_certificates()
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def get(self, path: str) -> Any:
        """Send a GET; return the decoded JSON, or None if the body is empty.

        Raises:
            ServerError: no connection, no response in time, a status other than 2xx, no JSON, or a response too large
                for the call.
        """
        body = await self._request("GET", path)
        return self._decoded(path, body)

    async def post(
        self, path: str, body: Any = None, *, seconds: float | None = None, size: int = ANSWER, alone: bool = False
    ) -> Any:
        """Send a POST; otherwise like `get`.

        Args:
            size: most bytes of the response.
            alone: on a connection of its own. A server may close that of a call that failed, without saying so: the
                next call would be lost.
        """
        answer = await self._request("POST", path, body, seconds=seconds, size=size, alone=alone)
        return self._decoded(path, answer)

    async def post_text(self, path: str, body: Any = None, *, seconds: float | None = None, alone: bool = False) -> str:
        """Send a POST; return the response as text. Arguments are those of `post`."""
        answer = await self._request("POST", path, body, seconds=seconds, alone=alone)
        return answer.decode(errors="replace")

    async def _request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        seconds: float | None = None,
        size: int = ANSWER,
        alone: bool = False,
    ) -> bytes:
        limit = self.seconds if seconds is None else seconds
        headers = {"Connection": "close"} if alone else None
        try:
            async with asyncio.timeout(limit):  # the client's own limit is between two bytes
                with self._transfer(path, limit):
                    async with self._http.stream(method, path, timeout=limit, json=body, headers=headers) as response:
                        await self._check_status(path, response)
                        return await read_body(response, size)
        except TimeoutError as error:
            raise ServerError(self.url, path, f"no complete response within {limit:g} s") from error

    def _decoded(self, path: str, body: bytes) -> Any:
        if not body:
            return None
        try:
            return parse_json(body)
        except (TooLargeError, UnreadableError) as error:
            raise ServerError(self.url, path, f"not JSON but {self.excerpt(body)}", OK) from error

    async def events(self, path: str, body: Any, size: StreamSize) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON objects of a streamed response to a POST, up to its `[DONE]`. If it is read to its end, the
        connection is reused; closing it earlier closes the connection. The caller limits its time.

        Raises:
            ServerError: as for `get`, also while reading; an event that is not a JSON object; an error that the server
                sent as an event; a response that breaks off.
        """
        timeout = httpx.Timeout(None, connect=self.seconds)
        done = False
        with self._transfer(path, self.seconds):
            async with self._http.stream("POST", path, json=body, timeout=timeout) as response:
                await self._check_status(path, response)
                async with aclosing(stream_lines(response, line=size.line, total=size.total)) as lines:
                    async for line in lines:
                        if done or not line.startswith(b"data:"):
                            continue  # blank lines between events, comments, and fields that no server of ours uses
                        data = line.removeprefix(b"data:").strip()
                        done = data == b"[DONE]"
                        if not done:
                            yield self._event(path, data)
        if not done:
            raise ServerError(self.url, path, "the stream was cut off")

    def _event(self, path: str, data: bytes) -> dict[str, Any]:
        event = self._decoded(path, data)
        if not isinstance(event, dict):
            reason = f"the stream has something other than a JSON object: {self.excerpt(data)}"
            raise ServerError(self.url, path, reason)
        if event.get("error") is not None:
            status = _status_of(event["error"])
            raise ServerError(self.url, path, f"ended with an error: {self.excerpt(data)}", status)
        return event

    @contextmanager
    def _transfer(self, path: str, seconds: float) -> Iterator[None]:
        """Raise `ServerError` if a transfer inside fails."""
        try:
            yield
        except (TooLargeError, UnreadableError) as error:
            raise ServerError(self.url, path, str(error)) from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ServerError(self.url, path, "can't be reached") from error
        except httpx.TimeoutException as error:
            raise ServerError(self.url, path, f"no answer for {seconds:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(self.url, path, f"the connection broke ({type(error).__name__})") from error

    async def _check_status(self, path: str, response: httpx.Response) -> None:
        """Raise RefusedError for 401 and 403, ServerError for any other status than 2xx."""
        self._http.cookies.clear()  # none of our servers uses cookies; they would accumulate, and be sent back
        status = response.status_code
        if 200 <= status < 300:
            return
        try:
            body = await read_body(response, ERROR, cut=True)
            message = self.excerpt(body)
        except UnreadableError as error:
            message = str(error)
        except (httpx.HTTPError, TimeoutError):  # the status says enough
            message = "no message"
        if status in (401, 403):
            raise RefusedError(
                f"{self.url}{path}: refused with status {status}: {message}",
                remedy="check token_env, and what the server was started with",
            )
        raise ServerError(self.url, path, f"status {status}: {message}", status, _retry_after(response.headers))

    def excerpt(self, text: bytes | str) -> str:
        """The server's message in one line, with the key that we sent removed."""
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        if self._key:
            text = text.replace(self._key, "…")
        return error_message(text)


@cache
def _certificates() -> ssl.SSLContext:
    """httpx's own certificates, loaded once, as loading takes longer than a call."""
    return httpx.create_ssl_context(trust_env=False)


def _retry_after(headers: httpx.Headers) -> float | None:
    """Seconds, if the header has a number; a date is ignored, because clocks differ."""
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", value):
        return float(value)
    return None


def busy_seconds(times: int, retry_after: float | None, key: int = 0) -> float:
    """Seconds to wait before retrying a busy server: what it asks for, else exponential backoff up to `LONGEST_BREAK`,
    shortened at random by up to half, so that the replicas of a run do not come back together.

    Args:
        times: how often in a row it was busy, including this time.
        retry_after: what it asks for.
        key: key of the random draw.
    """
    if retry_after is not None:
        return min(retry_after, LONGEST_BREAK)
    doublings = min(times - 1, 30)
    seconds = min(SHORTEST_BREAK * 2.0**doublings, LONGEST_BREAK)
    return seconds * (1 - mix(BUSY_SERVER, key, times) / 2**65)


@contextmanager
def as_expected(client: ServerClient, path: str, answer: object = None) -> Iterator[None]:
    """Raise `ServerError` if code inside fails to read an answer because it has an unexpected form.

    Args:
        answer: the answer, for the message.
    """
    try:
        yield
    except UserError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, KeyError):
            problem = missing(error.args[0], answer)
        elif isinstance(error, ValueError):
            problem = str(error)
        else:
            problem = f"{type(error).__name__}: {error}"
        raise ServerError(client.url, path, f"unexpected response: {one_line(problem)}") from error


async def answer_or_none(call: Awaitable[Any]) -> Any:
    """The answer to a call; None: the server answers with an error status, for example because it has no such path."""
    try:
        return await call
    except UserError:
        return None
    except ServerError as error:
        if error.status in (None, OK):
            raise
        return None


def _status_of(error: Any) -> int | None:
    """The HTTP status in an error that comes as an event: vLLM refuses a streamed request so, after status 200."""
    if not isinstance(error, dict):
        return None
    code = error.get("code")
    return code if type(code) is int and 400 <= code < 600 else None
