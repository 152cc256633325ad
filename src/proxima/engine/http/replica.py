"""One server, and what runs on it."""

from proxima.engine.http.client import Address, ServerClient
from proxima.engine.http.dialect import Dialect, ServerFacts


class Replica:
    """One server.

    Args:
        address: of the server.
        dialect: how it is spoken to.
        facts: what it can do.
        seconds: deadline of a call that names none.
    """

    def __init__(self, address: Address, dialect: Dialect, facts: ServerFacts, *, seconds: float) -> None:
        self.url, self.dialect, self.facts = address.url, dialect, facts
        self.client = ServerClient(address, seconds=seconds)
