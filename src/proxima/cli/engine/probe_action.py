"""`proxima engine probe URL`: ask a server for its capabilities."""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from proxima.cli.output import print_json
from proxima.cli.parameters import Argument
from proxima.data import FieldError, UserError

if TYPE_CHECKING:
    from proxima.engine.http.client import Address
    from proxima.engine.http.dialect import ServerFacts

TOKEN_ENV = "environment variable with the server's bearer token"
LOG_PROBS = {
    "processed": "of the distribution really sampled",
    "untruncated": "of softmax(logits / temperature), before top-k, top-p and min-p",
    "raw": "of softmax(logits), without temperature",
}


def probe_server(
    url: Annotated[str, Argument("the server's address: http://127.0.0.1:8000")],
    *,
    # those of `proxima.engine.http.detect.DIALECTS`, which needs numpy and httpx
    kind: Annotated[Literal["vllm", "sglang"] | None, Argument("what the server is; default: found by asking")] = None,
    token_env: Annotated[str | None, Argument(TOKEN_ENV, "NAME")] = None,
    allow_remote: Annotated[bool, Argument("the server may be on another machine")] = False,
    seconds: Annotated[float, Argument("deadline of a call; 60")] = 60.0,
    as_json: Annotated[bool, Argument("print the facts for programs", flag="--json")] = False,
) -> None:
    """Ask a server for its capabilities.

    Raises:
        UserError: the address is not valid, or a call failed.
    """
    from proxima.engine.http.client import Address

    if not 0 < seconds < float("inf"):
        raise UserError(f"--seconds {seconds:g}: must be > 0 and finite")
    try:
        address = Address(url, token_env, allow_remote)
    except FieldError as error:  # name the options of the command line
        text = str(error).replace("allow_remote=true", "--allow-remote").replace("token_env=", "--token-env ")
        raise UserError(text.replace(" token_env", " --token-env")) from error
    facts = asyncio.run(_facts(address, kind, seconds))
    if as_json:
        print_json(vars(facts) | {"more": dict(facts.more)})
    else:
        rows = list(fact_rows(facts))
        width = max(len(name) for name, _ in rows)
        print("\n".join(f"{name:<{width}}  {text}" for name, text in rows))


async def _facts(address: "Address", kind: Literal["vllm", "sglang"] | None, seconds: float) -> "ServerFacts":
    from proxima.engine.http.client import ServerClient, ServerError
    from proxima.engine.http.detect import detect_server

    client = ServerClient(address, seconds=seconds)
    try:
        return (await detect_server(client, kind))[1]
    except ServerError as error:
        if error.status is None:
            raise UserError(f"{error.url}: {error.reason}", remedy="start it, or check the address") from error
        raise UserError(str(error), remedy="see the server's log") from error
    finally:
        await client.close()


def fact_rows(facts: "ServerFacts") -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each fact: `version spans`, `yes`."""
    for name, value in vars(facts).items():
        if name == "more":
            yield from facts.more.items()
        elif name == "log_probs":
            yield "log-probs", "none" if value is None else f"{value}: {LOG_PROBS[value]}"
        else:
            yield name.replace("_", " "), _text(name, value)


def _text(name: str, value: Any) -> str:
    if value is None:
        return "none" if name == "quantization" else "not reported by the server"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
