"""One address: JSON calls with a deadline, and streams; errors name the server; proxies and redirects are refused."""

import asyncio
import ipaddress
import os
import re
import ssl
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import httpx

from proxima.data import FieldError, UserError, require
from proxima.data.bounded_reading import IDENTITY, TooLargeError, UnreadableError, parse_json, read_body, stream_lines
from proxima.data.random import BUSY_SERVER, mix
from proxima.data.secret_values import HIDDEN, is_secret_value
from proxima.engine.http.answer_values import error_message, missing, one_line

# httpcore imports it several times in a call; where it is not installed, each time looks through all of `sys.path`.
if "sniffio" not in sys.modules and find_spec("sniffio") is None:
    sys.modules["sniffio"] = None  # type: ignore[assignment]

# Servers close a connection that has been idle for five seconds, and a call may be lost that is sent in that moment.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
ANSWER = 4 << 20  # most bytes of an answer that grows with no request: what a server is, has and does
ERROR = 64 << 10  # bytes of an error's body that are read
TOKEN, SET = 2 << 10, 16  # most bytes of what is said of a token, and of an id among those that could be sampled
EVENT = 16 << 10  # of an event with one token, with all that comes with it
SHORTEST_BREAK, LONGEST_BREAK = 0.5, 60.0  # seconds that a busy server is left alone


class ServerError(OSError):
    """A call that failed and may succeed at another time, or at another server.

    Args:
        url: of the server.
        call: the path.
        reason: one line.
        status: HTTP status of the response; None: there was none.
        retry_after: seconds that the server wants to be left alone, if it says so.
    """

    def __init__(
        self, url: str, call: str, reason: str, status: int | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(f"{url}{call}: {reason}")
        self.url, self.call, self.reason, self.status, self.retry_after = url, call, reason, status, retry_after

    @property
    def busy(self) -> bool:
        """The server has too much to do for now."""
        return self.status in (429, 503)


class NotJsonError(ServerError):
    """A response of a good status that is not JSON."""


class RefusedError(UserError):
    """Status 401 or 403, the key: this server would refuse every other call too; others may take theirs."""


@dataclass(frozen=True)
class Address:
    """The address of a server and the settings of its connections.

    Args:
        url: `http://` or `https://`, no path.
        token_env: environment variable with a bearer token; None: no `Authorization`. The token is never written
            anywhere.
        allow_remote: the address may be of another machine: prompts, completions and weights go there, and whoever
            answers decides what is trained on.
        token: the bearer token itself, of a server that this process has started.

    Raises:
        FieldError: no such address, a variable that is not set, or another machine without leave and token.
    """

    url: str
    token_env: str | None = None
    allow_remote: bool = False
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            numbered = parts.port is None or 0 < parts.port < 1 << 16
        except ValueError:  # a port or a host that is none
            raise FieldError("url", self.url, "must be http://HOST:PORT, the port in 1..65535") from None
        require(numbered, "url", self.url, "must have a port in 1..65535")
        plain = parts.scheme in ("http", "https") and parts.hostname and not (parts.path.strip("/") or parts.query)
        require("@" not in parts.netloc, "url", HIDDEN, "must hold no password; give its variable in token_env")
        shown = HIDDEN if "?" in self.url else self.url  # a query may hold a key
        require(bool(plain), "url", shown, "must be http://HOST:PORT without a path")
        if self.token_env is not None:
            token = os.environ.get(self.token_env, "")
            shown = HIDDEN if is_secret_value(self.token_env) else self.token_env  # perhaps the key itself
            require(bool(token), "token_env", shown, "must name an environment variable that is set")
            sound = token.isascii() and token.isprintable() and " " not in token
            require(sound, "token_env", self.token_env, "holds a space, a line break or a sign that no key has")
        if not is_loopback(parts.hostname or ""):
            allowed = self.allow_remote and self.token_env is not None
            reason = "is on another machine: set allow_remote=true and token_env, the variable with the server's key"
            require(allowed, "url", self.url, reason)

    @property
    def headers(self) -> dict[str, str]:
        """With the token, if there is one."""
        token = self.token if self.token_env is None else os.environ[self.token_env]
        return {} if token is None else {"Authorization": f"Bearer {token}"}


def is_loopback(host: str) -> bool:
    """True if a host name can only be this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class StreamSize:
    """Limits on the size of a stream.

    Args:
        line, total: bytes of one line, and of all.
    """

    line: int = ANSWER
    total: int = 16 * ANSWER

    @classmethod
    def of(
        cls, tokens: int, *, prompt: int, set_size: int = 0, row_bytes: int = 0, repeats: bool = False
    ) -> "StreamSize":
        """The limits for a completion: so generous that only an invalid answer exceeds them.

        Args:
            tokens: of it, at most.
            prompt: tokens of its prompt, which come back.
            set_size: ids that come with each token.
            row_bytes: that come of each token of prompt and completion.
            repeats: each message may hold the whole answer so far.
        """
        line = ANSWER // 16 + SET * prompt + tokens * (TOKEN + SET * set_size) + row_bytes * (prompt + tokens)
        return cls(line=line, total=line * (tokens + 1) if repeats else line + (tokens + 16) * EVENT)


class ServerClient:
    """Calls to one server. Belongs to the event loop that first uses it. No answer may be longer than what was asked
    for can make it, compressed or not; `proxima.data.bounded_reading` stops at that.

    Args:
        address: of the server.
        seconds: deadline of a call that names none.
    """

    def __init__(self, address: Address, *, seconds: float = 60.0) -> None:
        self.address, self.url, self.seconds = address, address.url.rstrip("/"), seconds
        headers = address.headers
        self._key = headers.get("Authorization", "").removeprefix("Bearer ")
        # Proxies of the environment are not for an engine: they would see every prompt, and buffer the streams.
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers | IDENTITY, limits=LIMITS, trust_env=False, verify=_certificates()
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """Send a GET and return the decoded JSON, or None if the body is empty.

        Raises:
            ServerError: no connection, no answer in time, another status than 2xx, no JSON, or more than fits the call.
        """
        return self._decoded(path, await self._request("GET", path, query=query))

    async def post(
        self,
        path: str,
        body: Any = None,
        *,
        seconds: float | None = None,
        query: Mapping[str, str] | None = None,
        size: int = ANSWER,
    ) -> Any:
        """Send a POST and return the decoded JSON, as `get` does.

        Args:
            size: most bytes of the answer.
        """
        return self._decoded(path, await self._request("POST", path, body, query, seconds=seconds, size=size))

    async def post_text(self, path: str, body: Any = None) -> str:
        """Send a POST and return the answer as text."""
        return (await self._request("POST", path, body)).decode(errors="replace")

    async def _request(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        *,
        seconds: float | None = None,
        size: int = ANSWER,
    ) -> bytes:
        limit = self.seconds if seconds is None else seconds
        try:
            async with asyncio.timeout(limit):  # the client's own limit is between two bytes
                with self._transfer(path, limit):
                    async with self._http.stream(method, path, timeout=limit, json=body, params=query) as response:
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
            raise NotJsonError(self.url, path, f"no JSON but {self.told(body)}") from error

    @asynccontextmanager
    async def lines(self, path: str, body: Any, size: StreamSize | None = None) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of a streamed answer to a POST; leaving closes the connection. The caller limits its time.

        Raises:
            ServerError: as `get`, in the reading too.
        """
        timeout, size = httpx.Timeout(None, connect=self.seconds), size or StreamSize()
        with self._transfer(path, self.seconds):
            async with self._http.stream("POST", path, json=body, timeout=timeout) as response:
                await self._check_status(path, response)
                async with aclosing(stream_lines(response, line=size.line, total=size.total)) as lines:  # type: ignore[type-var]
                    yield lines

    @contextmanager
    def _transfer(self, path: str, seconds: float) -> Iterator[None]:
        """Context in which a failed transfer raises `ServerError`."""
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
        self._http.cookies.clear()  # no server of ours has any; they would add up, and be sent back
        status = response.status_code
        if 200 <= status < 300:
            return
        try:
            message = self.told(await read_body(response, ERROR, cut=True))
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

    def told(self, text: bytes | str) -> str:
        """A message of the server in one line, without the key that it was sent."""
        text = text if isinstance(text, str) else text.decode(errors="replace")
        return error_message(text.replace(self._key, "…") if self._key else text)


@cache
def _certificates() -> ssl.SSLContext:
    """The certificates of httpx, loaded once: loading takes longer than a call."""
    return httpx.create_ssl_context(trust_env=False)


def _retry_after(headers: httpx.Headers) -> float | None:
    """Seconds, where the header has a number; a date is not read, for clocks differ."""
    value = headers.get("Retry-After", "").strip()
    return float(value) if re.fullmatch(r"[0-9]{1,9}", value) else None


def busy_seconds(times: int, retry_after: float | None, key: int = 0) -> float:
    """Seconds to leave a busy server alone: what it asks for, else twice as long each time, up to `LONGEST_BREAK` and
    with up to half of it left out at random, so that the replicas of a run do not come back together.

    Args:
        times: how often in a row it was busy, this one included.
        retry_after: what it asks for.
        key: of the draw.
    """
    if retry_after is not None:
        return min(retry_after, LONGEST_BREAK)
    seconds = min(SHORTEST_BREAK * 2.0 ** min(times - 1, 30), LONGEST_BREAK)
    return seconds * (1 - mix(BUSY_SERVER, key, times) / 2**65)


async def stream_events(
    client: ServerClient, path: str, body: Any, size: StreamSize | None = None
) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON objects of a streamed answer to a POST, up to its `[DONE]`. Read to its end, its connection serves
    another call; closing it before that closes the connection.

    Raises:
        ServerError: as `ServerClient.lines`; an event that is no JSON object; an error that the server sent as an
            event; an answer that stops before its end.
    """
    done = False
    async with client.lines(path, body, size) as lines:
        async for line in lines:
            if done or not line.startswith(b"data:"):
                continue  # blank lines between events, comments, and fields that no server of ours uses
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
                continue
            try:
                event = parse_json(data)
            except (TooLargeError, UnreadableError) as error:
                raise ServerError(client.url, path, f"streams something else than JSON: {client.told(data)}") from error
            if not isinstance(event, dict):
                raise ServerError(client.url, path, f"streams something else than a JSON object: {client.told(data)}")
            if event.get("error") is not None:
                raise ServerError(client.url, path, f"ended with an error: {client.told(data)}")
            yield event
    if not done:
        raise ServerError(client.url, path, "the stream broke off")


@contextmanager
def as_expected(client: ServerClient, path: str, answer: object = None) -> Iterator[None]:
    """Context in which reading an answer of unexpected form raises `ServerError`.

    Args:
        answer: what is read, for the message.
    """
    try:
        yield
    except UserError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, KeyError):
            what = missing(error.args[0], answer)
        elif isinstance(error, ValueError):
            what = str(error)
        else:
            what = f"{type(error).__name__}: {error}"
        raise ServerError(client.url, path, f"an answer of another form than expected: {one_line(what)}") from error
