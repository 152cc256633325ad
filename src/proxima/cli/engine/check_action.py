"""`proxima engine check URL`: the laws of engines, against a live server.

Prints a line for each law: passed, skipped with the reason, or FAILED with what was found and what it would mean for a
run. Exit code 1 if a law failed. The server should have nothing else to do; laws that pause it or load weights are run
with --control alone."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from proxima.cli.check import show
from proxima.cli.engine.server_options import ServerPlace, add_server_options, with_server
from proxima.cli.output import print_json
from proxima.data import UserError

if TYPE_CHECKING:
    from proxima.check.bare_server import BareServer

LEAST_DRAWS = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    add = parser.add_argument
    model = "folder with the weights that the server should have; default: the server's own, if it is a folder here"
    add("--model", metavar="FOLDER", help=model)
    add("--control", action="store_true", help="pause the server and load the weights of --model too")
    add("--draws", type=int, default=3000, help="tokens to draw to compare their frequencies; 3000")
    add("--json", action="store_true", help="print every result for programs")


def run(arguments: argparse.Namespace) -> int:
    return check_server(
        ServerPlace.of(arguments),
        model=arguments.model,
        control=arguments.control,
        draws=arguments.draws,
        as_json=arguments.json,
    )


def check_server(
    place: ServerPlace, *, model: str | None = None, control: bool = False, draws: int = 3000, as_json: bool = False
) -> int:
    """Check the laws of engines on a live server, and print a line for each. Returns 1 if a law failed.

    Args:
        model: folder with the weights that the server should have; None: the server's own, if it is a folder here.
        control: pause the server and load the weights of `model` too.
        draws: tokens to draw to compare their frequencies.

    Raises:
        UserError: there is no such server or model, or there are too few draws.
    """
    from proxima.check import check_live_server

    if draws < LEAST_DRAWS:
        raise UserError(f"--draws {draws}: must be >= {LEAST_DRAWS} for the test to see anything")
    if model is not None and not (Path(model) / "config.json").is_file():
        raise UserError(f"--model {model}: no config.json there; give the folder of a model")
    server = _find(place)
    model = model or (server.facts.model if (Path(server.facts.model) / "config.json").is_file() else None)
    results = []
    for result in check_live_server(server, model, control=control, draws=draws):
        results.append(result)
        if not as_json:
            show(result)
    failed = sum(result.status == "FAILED" for result in results)
    if as_json:
        facts = {"url": place.url, "server": server.facts.server, "model": model, "failed": failed}
        rows = [{"law": r.law.name, "status": r.status, "detail": r.detail, "so": r.law.consequence} for r in results]
        print_json({**facts, "results": rows})
    else:
        passed = sum(result.status == "passed" for result in results)
        counts = f"{passed} passed, {failed} FAILED, {len(results) - passed - failed} skipped"
        print(f"{server.address.url} ({server.facts.server}, {model or 'no model to compare with'}): {counts}")
    return int(failed > 0)


def _find(place: ServerPlace) -> "BareServer":
    """The server, asked what it is and can do."""
    from proxima.check.bare_server import BareServer
    from proxima.engine.http.detect import detect_server

    async def found(client):  # type: ignore[no-untyped-def]
        dialect, facts = await detect_server(client, place.kind)
        return BareServer(client.address, dialect, facts, place.seconds)

    server: BareServer = with_server(place, found)
    return server
