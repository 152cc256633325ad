"""Limits on the requests of a scorer's clients."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ScorerLimits:
    """Limits of a scorer. A request that exceeds one is refused with the reason, or its connection is closed.

    Args:
        body_mb: size of a request, in MiB; all unanswered requests together may have 16 times as much.
        completions: completions per request.
        characters: characters per prompt and per completion.
        requests: requests that wait or are being scored; any more are answered 503.
        seconds: time from a request's last byte to its scores.
        read_seconds: time to receive the body of a request, and as long again for its headers.
        connections: simultaneous connections; any more are closed.
    """

    body_mb: int = 16
    completions: int = 4096
    characters: int = 200_000
    requests: int = 64
    seconds: float = 300
    read_seconds: float = 30
    connections: int = 512
