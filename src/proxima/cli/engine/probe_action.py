"""`proxima engine probe URL`: ask a server for its capabilities."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from proxima.cli.engine.server_options import ServerPlace, with_server
from proxima.cli.output import print_json
from proxima.cli.parameters import Argument

if TYPE_CHECKING:
    from proxima.engine.http.dialect import ServerFacts

MEANINGS = {
    "log_probs": {
        "processed": "of the distribution really sampled",
        "untruncated": "of softmax(logits / temperature), before top-k, top-p and min-p",
        "raw": "of softmax(logits), without temperature",
        None: "none",
    }
}


def probe_server(
    place: ServerPlace, *, as_json: Annotated[bool, Argument("print the facts for programs", flag="--json")] = False
) -> None:
    """Ask a server for its capabilities."""
    from proxima.engine.http.detect import detect_server

    _, facts = with_server(place, lambda client: detect_server(client, place.kind))
    if as_json:
        print_json(plain_facts(facts))
    else:
        rows = list(fact_rows(facts))
        width = max(len(name) for name, _ in rows)
        print("\n".join(f"{name:<{width}}  {text}" for name, text in rows))


def plain_facts(facts: "ServerFacts") -> dict[str, Any]:
    """The facts as JSON values."""
    return vars(facts) | {"more": dict(facts.more)}


def fact_rows(facts: "ServerFacts") -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each fact: `version spans`, `yes`."""
    for name, value in plain_facts(facts).items():
        if name == "more":
            yield from facts.more.items()
        elif name in MEANINGS:
            meaning = MEANINGS[name][value]
            yield name.replace("_", "-"), meaning if value is None else f"{value}: {meaning}"
        else:
            yield name.replace("_", " "), _text(name, value)


def _text(name: str, value: Any) -> str:
    if value is None:
        return "none" if name == "quantization" else "not reported by the server"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
