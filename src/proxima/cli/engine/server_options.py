"""The options that select a server."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from proxima.cli.parameters import Argument
from proxima.data import FieldError, UserError

if TYPE_CHECKING:
    from proxima.engine.http.client import ServerClient

T = TypeVar("T")
TOKEN_ENV = "environment variable with the server's bearer token"


@dataclass(frozen=True)
class ServerPlace:
    """The server that a command addresses.

    The kinds are those of `proxima.engine.http.detect.DIALECTS`, which needs numpy and httpx.
    """

    url: Annotated[str, Argument("the server's address: http://127.0.0.1:8000")]
    _: KW_ONLY
    kind: Annotated[Literal["vllm", "sglang"] | None, Argument("what the server is; default: found by asking")] = None
    token_env: Annotated[str | None, Argument(TOKEN_ENV, "NAME")] = None
    allow_remote: Annotated[bool, Argument("the server may be on another machine")] = False
    seconds: Annotated[float, Argument("deadline of a call; 60")] = 60.0


def with_server(place: ServerPlace, use: "Callable[[ServerClient], Awaitable[T]]") -> T:
    """Return the result of `use(client)`, then close the connections.

    Raises:
        UserError: the address is not valid, or a call failed.
    """
    from proxima.engine.http.client import Address, ServerClient, ServerError

    if not 0 < place.seconds < float("inf"):
        raise UserError(f"--seconds {place.seconds:g}: must be > 0 and finite")
    try:
        address = Address(place.url, place.token_env, place.allow_remote)
    except FieldError as error:  # name the options of the command line
        text = str(error).replace("allow_remote=true", "--allow-remote").replace("token_env=", "--token-env ")
        raise UserError(text.replace(" token_env", " --token-env")) from error
    client = ServerClient(address, seconds=place.seconds)

    async def used() -> T:
        try:
            return await use(client)
        except ServerError as error:
            if error.status is None:
                raise UserError(f"{error.url}: {error.reason}", remedy="start it, or check the address") from error
            raise UserError(str(error), remedy="see the server's log") from error
        finally:
            await client.close()

    return asyncio.run(used())
