"""A POST with a deadline and further attempts, by the standard library: a request now and then needs no pool of connections."""

import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping

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
        backoff: seconds before the second attempt, doubled before each further one; what `Retry-After` says where it is longer; at most
            `MAX_WAIT`.

    Raises:
        PostFailed: what the last attempt came to. A status that time won't heal (400, 404 …) is not tried again.
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
    until = time.monotonic() + seconds
    request = urllib.request.Request(url, data=body, headers=dict(headers), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return _read(response, until)
    except urllib.error.HTTPError as problem:
        with problem:
            wait = str(problem.headers.get("Retry-After", ""))
        seconds_told = float(wait) if re.fullmatch(r"[0-9]{1,4}", wait) else 0.0
        raise PostFailed(f"{url} answers {problem.code} {problem.reason}", problem.code, seconds_told) from None
    except TimeoutError:
        raise PostFailed(f"{url} has not answered after {seconds:g} s") from None
    except urllib.error.URLError as problem:
        if isinstance(problem.reason, TimeoutError):
            raise PostFailed(f"{url} has not answered after {seconds:g} s") from None
        raise PostFailed(f"{url} can't be reached: {_words(problem.reason)}") from None
    except (OSError, http.client.HTTPException) as problem:
        raise PostFailed(f"{url} broke off: {_words(problem)}") from None


def _read(response: http.client.HTTPResponse, until: float) -> bytes:
    """The body, however slowly it drips: the socket's own time-out begins anew with each byte."""
    parts, size = [], 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > MAX_BYTES:
            raise OSError(f"an answer of more than {MAX_BYTES >> 20} MiB")
        if time.monotonic() > until:
            raise TimeoutError
    if response.length:  # what `read` would have raised for
        raise http.client.IncompleteRead(b"".join(parts), response.length)
    return b"".join(parts)


def _words(problem: object) -> str:
    """`[Errno 111] Connection refused` without the number."""
    text = getattr(problem, "strerror", None) or str(problem)
    return text or type(problem).__name__
