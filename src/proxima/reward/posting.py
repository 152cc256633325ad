"""POST requests of rewards: attempts with growing pauses, bounds, and a token that no message shows."""

import asyncio
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from time import monotonic
from typing import Any, TypeVar

import httpx

from proxima.data import UserError, require
from proxima.system.bounded_reading import IDENTITY, TooLargeError, UnreadableError, parse_json, read_body
from proxima.system.http_clients import async_http_client
from proxima.system.secret_values import HIDDEN, without_secrets

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})  # the next attempt may succeed
MAX_WAIT = 30.0  # longest wait between two attempts, in seconds
ERROR_BYTES = 4096  # limit of the body of an error response
REFUSED_BY_CHECK = frozenset({401, 403, 404, 405, 407})  # wrong address, wrong method, no permission
T = TypeVar("T")
S = TypeVar("S", str, bytes)

pause: Callable[[float], Awaitable[None]] = asyncio.sleep


class PostFailed(OSError):
    """A request without a usable response.

    Args:
        reason: one line.
        status: HTTP status of the response; None without a response.
        retry_after: seconds that the server asks to wait.
    """

    def __init__(self, reason: str, status: int | None = None, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.status = status
        self.retry_after = retry_after


class UnusableError(ValueError):
    """A response that another attempt may better: the model that wrote it draws anew."""


@dataclass(frozen=True, kw_only=True)
class PostLimits:
    """How often and how long a request is tried.

    Args:
        seconds: of one attempt, from connecting to the last byte.
        retries: attempts after the first.
        backoff: seconds before the second attempt, doubled before each further one; a longer `Retry-After` takes
            precedence; at most `MAX_WAIT`.
        deadline: seconds of all attempts together, with the waits between them.
    """

    seconds: float
    retries: int
    backoff: float
    deadline: float = float("inf")


async def post(
    url: str, body: Callable[[int], bytes], *, token: str, limit: int, attempts: PostLimits, read: Callable[[bytes], T]
) -> T:
    """What `read` makes of the response to a POST of JSON.

    Only statuses in `RETRIED`, requests without a response, and an `UnusableError` of `read` are tried again. A
    redirect is not followed, because that would send the token to another server.

    Args:
        body: the JSON of an attempt, which is numbered from 0.
        token: a bearer token; empty: none. It is masked in what is raised.
        limit: most bytes of a response.

    Raises:
        PostFailed: the last attempt failed, or the deadline is over; whatever `read` raises.
    """
    headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "proxima", **IDENTITY}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    end = monotonic() + attempts.deadline
    for attempt in range(attempts.retries + 1):
        failure: PostFailed | UnusableError
        try:
            seconds = min(attempts.seconds, end - monotonic())
            data = await asyncio.wait_for(_exchange(url, body(attempt), headers, limit, token), seconds)
            return read(data)
        except UnusableError as error:
            failure = error
        except PostFailed as error:
            failure = error
        except (TimeoutError, httpx.TimeoutException):
            failure = PostFailed(f"{url} has not answered after {round(max(seconds, 0.0), 3):g} s")
        except (httpx.ConnectError, httpx.ProxyError, httpx.UnsupportedProtocol) as error:
            failure = PostFailed(f"{url} can't be reached: {error}")
        except httpx.TransportError as error:
            failure = PostFailed(f"{url} closed the connection ({type(error).__name__})")
        status = getattr(failure, "status", None)
        if status is not None and status not in RETRIED:
            raise _masked(failure, str(failure), token)
        if attempt < attempts.retries:
            wait = min(MAX_WAIT, max(attempts.backoff * 2**attempt, getattr(failure, "retry_after", 0.0)))
            if monotonic() + wait >= end:
                over = f"{failure}; no further attempt within {attempts.deadline:g} s"
                raise _masked(failure, over, token)
            await pause(wait)
    times = ""
    if attempts.retries:
        times = f", {attempts.retries + 1} times"
    raise _masked(failure, f"{failure}{times}", token)


def _masked(failure: PostFailed | UnusableError, reason: str, token: str) -> PostFailed | UnusableError:
    """The failure, without the token, which a server may repeat in its message."""
    shown = without(reason, token)
    if isinstance(failure, PostFailed):
        return PostFailed(shown, failure.status)
    return UnusableError(shown)


def require_reachable(call: Callable[[], Any], what: str) -> None:
    """Make a call before a run.

    Args:
        what: the server, for the remedy.

    Raises:
        UserError: there is no server, or it is the wrong one; another failure may pass, and is none here.
    """
    try:
        call()
    except PostFailed as error:
        if error.status is None:
            raise UserError(str(error), remedy=f"start {what} before the run") from None
        if 300 <= error.status < 400:
            raise UserError(str(error), remedy="give the address that it leads to") from None
        if error.status in REFUSED_BY_CHECK:
            raise UserError(str(error), remedy="is it the right address, and may you use it?") from None


async def _exchange(url: str, body: bytes, headers: Mapping[str, str], limit: int, token: str) -> bytes:
    """Send one request and return the response's body of at most `limit` bytes. httpx's own timeouts restart with each
    byte, so the caller limits the whole exchange."""
    async with (
        async_http_client(url, proxied=True, timeout=None, verify=_tls()) as client,
        client.stream("POST", url, content=body, headers=dict(headers)) as response,
    ):
        status = response.status_code
        if not response.is_success:
            wait = response.headers.get("Retry-After", "")
            seconds = float(wait) if re.fullmatch(r"[0-9]{1,4}", wait) else 0.0
            message = f"{url} answers {status} {response.reason_phrase[:80]}"
            if 300 <= status < 400:
                message += ", a redirect, which is not followed"
            message += await _explanation(response, token)
            raise PostFailed(message, status, seconds)
        try:
            return await read_body(response, limit)
        except (TooLargeError, UnreadableError) as error:
            raise PostFailed(f"{url} sends {error}", status) from None


async def _explanation(response: httpx.Response, token: str) -> str:
    """`: why`, from `error`, or `detail` as some frameworks name it, in a short JSON body; else empty."""
    content: Any = None
    if "Content-Length" in response.headers:  # don't wait for the end of a stream
        with suppress(ValueError, httpx.TransportError):
            content = parse_json(await read_body(response, ERROR_BYTES))
    shown = without_secrets(without(_reason(content), token))  # before it is cut: a part of the token is secret, too
    return f": {shown[:200]}" if shown else ""


def _reason(content: object) -> str:
    """The first text on one line under a key of an error, or under its `message`; empty: there is none."""
    if not isinstance(content, dict):
        return ""
    for key in ("error", "detail", "message"):
        why = content.get(key)
        if isinstance(why, dict):
            why = why.get("message")
        if isinstance(why, str):
            return " ".join(why.split())
    return ""


def bearer_token(variable: str, field: str) -> str:
    """The token in an environment variable; FieldError, which does not show it, if it can't be sent in a header."""
    token = os.environ.get(variable, "")
    require(bool(token), field, variable, "must name an environment variable that is set")
    sendable = re.fullmatch(r"[\x21-\x7e]+", token) is not None
    require(sendable, field, variable, "must hold a token of ASCII characters without spaces or line ends")
    return token


def without(said: S, token: S) -> S:
    """What a server said, without the token, if there is one."""
    if not token:
        return said
    hidden: Any = HIDDEN if isinstance(said, str) else HIDDEN.encode()
    return said.replace(token, hidden)


def token_note(variable: str | None) -> str:
    """Where the token comes from, for `WeightedReward.sends`; it is not shown."""
    if variable is None:
        return ""
    return f", with the token in ${variable}"


@cache
def _tls() -> ssl.SSLContext:
    """The system's certificates, loaded once: loading them takes longer than a request."""
    return ssl.create_default_context()


def check_url(url: str, example: str) -> None:
    """Raise FieldError unless it is an address of HTTP without a password; `example` is shown to the user."""
    try:
        parts = httpx.URL(url)
        valid = parts.scheme in ("http", "https") and bool(parts.host) and re.search(r"\s", url) is None
    except httpx.InvalidURL:
        valid = False
    require(valid, "url", url, f"must be an address such as {example}")
    redacted = f"{parts.scheme}://…@{parts.host}"
    require(not parts.password, "url", redacted, "must hold no password: it would be written down; use token_env")
