"""Limits on the requests of a scorer's clients."""

from dataclasses import dataclass, fields

from proxima.data import require


@dataclass(frozen=True, kw_only=True)
class ScorerLimits:
    """Limits. A request beyond one is refused with the reason; a connection without a complete request is closed.

    Args:
        body_mb: size of a request, in MiB.
        completions: of a request.
        characters: of a prompt and of a completion.
        requests: that wait or are being scored; a further one is answered 503.
        seconds: from a request's last byte to its scores.
        read_seconds: from a request's first byte to its last, and as long again for its headers.
        connections: at once; a further one is closed.
    """

    body_mb: int = 16
    completions: int = 4096
    characters: int = 200_000
    requests: int = 64
    seconds: float = 300
    read_seconds: float = 30
    connections: int = 512

    def __post_init__(self) -> None:
        for field in fields(self):
            require(getattr(self, field.name) > 0, field.name, getattr(self, field.name), "must be > 0")

    @property
    def body_bytes(self) -> int:
        return self.body_mb << 20

    @property
    def held_bytes(self) -> int:
        """Bytes held for all requests that are not yet answered."""
        return 16 * self.body_bytes

    @property
    def per_token_characters(self) -> int:
        """Characters of all completions in a request for token scores, each of which is a number in the response."""
        return 5 * self.characters
