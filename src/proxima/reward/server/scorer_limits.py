"""Limits on the requests of a scorer's clients."""

from dataclasses import dataclass, fields

from proxima.data import require


@dataclass(frozen=True, kw_only=True)
class ScorerLimits:
    """Each a refusal with its reason, or of a connection without a complete request its end.

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
        """Of all requests that are not yet answered."""
        return 16 * self.body_bytes

    @property
    def per_token_characters(self) -> int:
        """Of all completions of a request for the scores of tokens, each of which is a number of the response."""
        return 5 * self.characters
