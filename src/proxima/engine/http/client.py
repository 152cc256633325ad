"""One address: JSON calls with a deadline, and streams; errors that name the server, and the rule about strangers."""

import asyncio
import ipaddress
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from proxima.data import FieldError, UserError, require

# Servers close a connection that has been idle for five seconds, and a call may be lost that is sent in that moment.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)


class ServerError(OSError):
    """A call that failed and may succeed at another time, or at another server.

    Args:
        url: of the server.
        call: the path.
        reason: one line.
        status: HTTP status of the response; None: there was none.
    """

    def __init__(self, url: str, call: str, reason: str, status: int | None = None) -> None:
        super().__init__(f"{url}{call}: {reason}")
        self.url, self.call, self.reason, self.status = url, call, reason, status


class NotJsonError(ServerError):
    """A response of a good status that is not JSON; `excerpt` is how it begins."""

    def __init__(self, url: str, call: str, excerpt: str) -> None:
        super().__init__(url, call, f"answers no JSON but {excerpt}")
        self.excerpt = excerpt


class RefusedError(UserError):
    """Status 401 or 403, the key: this server would refuse every other call too; others may take theirs."""


@dataclass(frozen=True)
class Address:
    """Where a server is, and how it is spoken to.

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
        require(bool(plain), "url", self.url, "must be http://HOST:PORT without a path")
        require("@" not in parts.netloc, "url", "…", "must hold no password; give its variable in token_env")
        if self.token_env is not None:
            token = os.environ.get(self.token_env, "")
            require(bool(token), "token_env", self.token_env, "must name an environment variable that is set")
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
    """Whether a host name can only be this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ServerClient:
    """Calls to one server. Belongs to the event loop that first uses it.

    Args:
        address: of the server.
        seconds: deadline of a call that names none.
    """

    def __init__(self, address: Address, *, seconds: float = 60.0) -> None:
        self.address, self.url, self.seconds = address, address.url.rstrip("/"), seconds
        # Proxies of the environment are not for an engine: they would see every prompt, and buffer the streams.
        self._http = httpx.AsyncClient(base_url=self.url, headers=address.headers, limits=LIMITS, trust_env=False)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def get(self, path: str, **query: Any) -> Any:
        """What a GET answers: JSON decoded, None where the body is empty.

        Raises:
            ServerError: no connection, no answer in time, another status than 2xx, or no JSON.
        """
        return await self._call("GET", path, None, params=query)

    async def post(
        self, path: str, body: Any = None, *, seconds: float | None = None, query: Mapping[str, Any] | None = None
    ) -> Any:
        """The same of a POST."""
        return await self._call("POST", path, seconds, json=body, params=dict(query or {}))

    async def post_text(self, path: str, body: Any = None) -> str:
        """What a POST answers that is no JSON."""
        return (await self._request("POST", path, None, json=body)).text

    async def _request(self, method: str, path: str, seconds: float | None, **more: Any) -> httpx.Response:
        limit = self.seconds if seconds is None else seconds
        try:
            async with asyncio.timeout(limit):  # the client's own limit is between two bytes
                response = await self._http.request(method, path, timeout=limit, **more)
        except TimeoutError as error:
            raise ServerError(self.url, path, f"no complete response within {limit:g} s") from error
        except httpx.HTTPError as error:
            raise self.failed(path, error, limit) from error
        self.check_status(path, response.status_code, response.text)
        return response

    async def _call(self, method: str, path: str, seconds: float | None, **more: Any) -> Any:
        response = await self._request(method, path, seconds, **more)
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise NotJsonError(self.url, path, _excerpt(response.text)) from error

    @asynccontextmanager
    async def lines(self, path: str, body: Any) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of a streamed answer to a POST; leaving closes the connection. The caller limits its time.

        Raises:
            ServerError: as `get`, in the reading too.
        """
        timeout = httpx.Timeout(None, connect=self.seconds)
        try:
            async with self._http.stream("POST", path, json=body, timeout=timeout) as response:
                if response.status_code >= 300:
                    self.check_status(path, response.status_code, (await response.aread()).decode(errors="replace"))
                async with aclosing(response.aiter_lines()) as lines:  # type: ignore[type-var]
                    yield lines
        except httpx.HTTPError as error:
            raise self.failed(path, error, self.seconds) from error

    def failed(self, path: str, error: httpx.HTTPError, seconds: float) -> ServerError:
        """What a failed transfer means."""
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ServerError(self.url, path, "can't be reached")
        if isinstance(error, httpx.TimeoutException):
            return ServerError(self.url, path, f"no answer for {seconds:g} s")
        return ServerError(self.url, path, f"the connection broke ({type(error).__name__})")

    def check_status(self, path: str, status: int, text: str) -> None:
        """Raise RefusedError for 401 and 403, ServerError for any other status than 2xx."""
        if status in (401, 403):
            raise RefusedError(
                f"{self.url}{path}: refused with status {status}: {_excerpt(text)}",
                remedy="check token_env, and what the server was started with",
            )
        if not 200 <= status < 300:
            raise ServerError(self.url, path, f"status {status}: {_excerpt(text)}", status)


async def stream_events(client: ServerClient, path: str, body: Any) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON objects of a streamed answer to a POST, up to its `[DONE]`. Read to its end, its connection serves
    another call; closing it before that closes the connection.

    Raises:
        ServerError: as `ServerClient.lines`; an event that is no JSON object; an error that the server sent as an
            event; an answer that stops before its end.
    """
    done = False
    async with client.lines(path, body) as lines:
        async for line in lines:
            if done or not line.startswith("data:"):
                continue  # blank lines between events, comments, and fields that no server of ours uses
            data = line[5:].strip()
            if data == "[DONE]":
                done = True
                continue
            try:
                event = json.loads(data)
            except ValueError as error:
                raise ServerError(client.url, path, f"streams something else than JSON: {data[:100]}") from error
            if not isinstance(event, dict):
                raise ServerError(client.url, path, f"streams something else than a JSON object: {data[:100]}")
            if (failure := event.get("error")) is not None:
                told = failure.get("message", failure) if isinstance(failure, dict) else failure
                raise ServerError(client.url, path, f"ended with an error: {' '.join(str(told).split())[:200]}")
            yield event
    if not done:
        raise ServerError(client.url, path, "the stream broke off")


@contextmanager
def as_expected(client: ServerClient, path: str) -> Iterator[None]:
    """Reading an answer inside raises `ServerError` where it has another form."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ServerError(client.url, path, f"an answer of another form than expected: {what}") from error


def _excerpt(text: str) -> str:
    """The message of an error's body, in one line."""
    try:
        found = json.loads(text)
        error = found.get("error", found)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        if text.lstrip()[:1] == "<":
            return "an HTML page"
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:199] + "…"
