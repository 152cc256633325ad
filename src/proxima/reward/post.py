"""A POST with a deadline and further attempts, by the standard library: a request now and then needs no pool of
connections."""

import http.client
import io
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})  # may be over by the next attempt
MAX_WAIT = 30.0  # seconds between two attempts at most
MAX_BYTES = 64 << 20


class PostFailed(OSError):
    """No answer, or one that is an error; `code` is its HTTP status, None where there was none."""

    def __init__(self, why: str, code: int | None = None, wait: float = 0.0) -> None:
        super().__init__(why)
        self.code, self.wait = code, wait


def post(url: str, body: bytes, headers: Mapping[str, str], *, seconds: float, retries: int, backoff: float) -> bytes:
    """The bytes of the answer.

    Args:
        seconds: time for one attempt, from connecting to the last byte.
        retries: attempts after the first.
        backoff: seconds before the second attempt, doubled before each further one; what `Retry-After` says where it is
            longer; at most `MAX_WAIT`.

    Raises:
        PostFailed: what the last attempt came to. A status that time won't heal (400, 404 …) is not tried again. A
            redirect is such a
            status: followed, it would take the token to another server, and there a GET without the body.
    """
    for attempt in range(retries + 1):
        try:
            return _once(url, body, headers, seconds)
        except PostFailed as problem:
            last = problem
        if last.code is not None and last.code not in PASSING:
            break
        if attempt < retries:
            time.sleep(min(MAX_WAIT, max(backoff * 2**attempt, last.wait)))
    else:
        if retries:
            raise PostFailed(f"{last}, {retries + 1} times", last.code)
    raise last


def _once(url: str, body: bytes, headers: Mapping[str, str], seconds: float) -> bytes:
    request = urllib.request.Request(url, data=body, headers=dict(headers), method="POST")
    try:
        with urllib.request.build_opener(_Http, _Https, _Stay).open(request, timeout=seconds) as response:
            return _read(response)
    except urllib.error.HTTPError as problem:
        with problem:
            wait = str(problem.headers.get("Retry-After", ""))
        seconds_told = float(wait) if re.fullmatch(r"[0-9]{1,4}", wait) else 0.0
        leads = ", a redirect, which is not followed" if 300 <= problem.code < 400 else ""
        raise PostFailed(f"{url} answers {problem.code} {problem.reason}{leads}", problem.code, seconds_told) from None
    except TimeoutError:
        raise PostFailed(f"{url} has not answered after {seconds:g} s") from None
    except urllib.error.URLError as problem:
        if isinstance(problem.reason, TimeoutError):
            raise PostFailed(f"{url} has not answered after {seconds:g} s") from None
        raise PostFailed(f"{url} can't be reached: {_words(problem.reason)}") from None
    except (OSError, http.client.HTTPException) as problem:
        raise PostFailed(f"{url} broke off: {_words(problem)}") from None


def _read(response: http.client.HTTPResponse) -> bytes:
    parts, size = [], 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > MAX_BYTES:
            raise OSError(f"an answer of more than {MAX_BYTES >> 20} MiB")
    if response.length:  # what `read` would have raised for
        raise http.client.IncompleteRead(b"".join(parts), response.length)
    return b"".join(parts)


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it becomes an error of its status."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


class _Stream(io.RawIOBase):
    """What a socket says until a moment; the socket's own time-out would begin anew with each byte."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock, self._until = sock, until
        self._stream = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left(self._until))
        return self._stream.readinto(buffer)

    def close(self) -> None:
        self._stream.close()
        super().close()


class _Channel:
    """As much of a socket as `http.client` uses of it once it is connected, each call within what is left of the
    time."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock, self._until = sock, until

    def sendall(self, data: Any) -> None:
        self._sock.settimeout(_left(self._until))
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Stream(self._sock, self._until))

    def close(self) -> None:
        self._sock.close()  # which waits until the stream is closed too


class _Connection(http.client.HTTPConnection):
    """One that keeps its time-out from connecting to the last byte."""

    def connect(self) -> None:
        until = time.monotonic() + float(self.timeout or 0.0)
        super().connect()
        self.sock: Any = _Channel(self.sock, until)


class _SafeConnection(http.client.HTTPSConnection):
    """The same, encrypted."""

    def connect(self) -> None:
        until = time.monotonic() + float(self.timeout or 0.0)
        super().connect()
        self.sock: Any = _Channel(self.sock, until)


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SafeConnection, req)


def _left(until: float) -> float:
    """Seconds until then.

    Raises:
        TimeoutError: there are none.
    """
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _words(problem: object) -> str:
    """`[Errno 111] Connection refused` without the number."""
    text = getattr(problem, "strerror", None) or str(problem)
    return text or type(problem).__name__
