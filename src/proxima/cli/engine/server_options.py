"""The options that say which server is meant."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

from proxima.data import FieldError, UserError

if TYPE_CHECKING:
    from proxima.engine.http.client import ServerClient

T = TypeVar("T")
KINDS = ("vllm", "sglang")  # as `proxima.engine.http.detect.DIALECTS`, which needs numpy and httpx


def add_server_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", help="the server's address: http://127.0.0.1:8000")
    add("--kind", choices=KINDS, help="what the server is; default: found by asking")
    add("--token-env", metavar="NAME", help="environment variable with the server's bearer token")
    add("--allow-remote", action="store_true", help="the server may be on another machine")
    add("--seconds", type=float, default=60.0, help="deadline of a call; 60")


@dataclass(frozen=True, kw_only=True)
class ServerPlace:
    """Which server is meant: the values of the options."""

    url: str
    kind: str | None = None
    token_env: str | None = None
    allow_remote: bool = False
    seconds: float = 60.0

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "ServerPlace":
        return cls(**{field.name: getattr(arguments, field.name) for field in fields(cls)})


def with_server(place: ServerPlace, use: "Callable[[ServerClient], Awaitable[T]]") -> T:
    """What `use(client)` gives; the connections are closed.

    Raises:
        UserError: an address that can't be meant, or a call that failed.
    """
    from proxima.engine.http.client import Address, ServerClient, ServerError

    if not 0 < place.seconds < float("inf"):
        raise UserError(f"--seconds {place.seconds:g}: must be > 0 and finite")
    try:
        address = Address(place.url, place.token_env, place.allow_remote)
    except FieldError as error:  # in the words of a command line
        text = str(error).replace("allow_remote=true", "--allow-remote").replace("token_env=", "--token-env ")
        raise UserError(text.replace(" token_env", " --token-env")) from error
    client = ServerClient(address, seconds=place.seconds)

    async def used() -> T:
        try:
            return await use(client)
        except ServerError as error:
            raise UserError(str(error), remedy="see the server's log") from error
        finally:
            await client.close()

    return asyncio.run(used())
