"""Detection of the kind of server at an address, and its capabilities."""

from typing import Any

from proxima.data import UserError
from proxima.engine.http.client import Address, ServerClient
from proxima.engine.http.dialect import Dialect, ServerFacts
from proxima.engine.http.sglang import SglangDialect
from proxima.engine.http.vllm import VllmDialect
from proxima.engine.protocol import ServerError

DIALECTS: dict[str, type[Dialect]] = {"vllm": VllmDialect, "sglang": SglangDialect}
# a call that only this kind has, and a field of its answer
SIGNS = {"sglang": ("/model_info", "model_path"), "vllm": ("/version", "version")}


async def detect_server(client: ServerClient, kind: str | None = None) -> tuple[Dialect, ServerFacts]:
    """Return the server's dialect and its facts.

    Args:
        kind: one of `DIALECTS`; None: detected by asking.

    Raises:
        ServerError: no server answers, or a call to it fails.
        UserError: it is not of a known kind.
    """
    dialect = DIALECTS[kind or await _find_kind(client)]()
    return dialect, await dialect.probe(client)


async def _find_kind(client: ServerClient) -> str:
    for kind, (path, name) in SIGNS.items():
        try:
            answer = await client.get(path)
        except ServerError as error:
            if error.status is None:
                raise
            continue
        if isinstance(answer, dict) and name in answer:
            return kind
    remedy = "give the address of the server itself, without a path"
    raise UserError(f"{client.url} is neither {' nor '.join(DIALECTS)}", remedy=remedy)


async def server_facts(
    url: str, token_env: str | None, allow_remote: bool, kind: str | None, seconds: float
) -> dict[str, Any]:
    """Ask the server at an address for its facts.

    Raises:
        FieldError: the address is not valid.
        UserError: no server answers within `seconds`, or it is not of a known kind.
    """
    client = ServerClient(Address(url, token_env, allow_remote), seconds=seconds)
    try:
        _, facts = await detect_server(client, kind)
        return vars(facts) | {"more": dict(facts.more)}
    except ServerError as error:
        if error.status is None:
            raise UserError(f"{error.url}: {error.reason}", remedy="start it, or check the address") from error
        raise UserError(str(error), remedy="see the server's log") from error
    finally:
        await client.close()
