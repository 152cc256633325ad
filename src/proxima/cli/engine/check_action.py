"""`proxima engine check URL`: check the laws of engines against a live server.

Prints a line for each law: passed, skipped with the reason, or FAILED with the finding and its consequence for a run.
Exit code 1 if a law failed. The server should have no other load; laws that pause it or load weights are run only with
--control."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from proxima.cli.check import print_results
from proxima.cli.engine.server_options import ServerPlace, with_server
from proxima.cli.parameters import Argument
from proxima.data import UserError

if TYPE_CHECKING:
    from proxima.laws.bare_server import BareServer

LEAST_DRAWS = 600
MODEL = "folder with the weights that the server should have; default: the server's own, if it is a folder here"


def check_server(
    place: ServerPlace,
    *,
    model: Annotated[str | None, Argument(MODEL, "FOLDER")] = None,
    control: Annotated[bool, Argument("pause the server and load the weights of --model too")] = False,
    draws: Annotated[int, Argument("tokens to draw to compare their frequencies; 3000")] = 3000,
    as_json: Annotated[bool, Argument("print every result for programs", flag="--json")] = False,
) -> int:
    """Check the laws of engines against a live server; exit code 1 if one fails.

    Raises:
        UserError: the server can't be reached, the model does not exist, or there are too few draws.
    """
    from proxima.laws import check_live_server

    if draws < LEAST_DRAWS:
        raise UserError(f"--draws {draws}: must be >= {LEAST_DRAWS} for the test to see anything")
    if model is not None and not (Path(model) / "config.json").is_file():
        raise UserError(f"--model {model}: no config.json there; give the folder of a model")
    server = _find(place)
    model = model or (server.facts.model if (Path(server.facts.model) / "config.json").is_file() else None)
    facts = {"url": place.url, "server": server.facts.server, "model": model}
    what = f"{server.address.url} ({server.facts.server}, {model or 'no model to compare with'})"
    return print_results(what, facts, check_live_server(server, model, control=control, draws=draws), as_json)


def _find(place: ServerPlace) -> "BareServer":
    """Detect the server's kind and capabilities."""
    from proxima.engine.http.detect import detect_server
    from proxima.laws.bare_server import BareServer

    async def detected(client):  # type: ignore[no-untyped-def]
        dialect, facts = await detect_server(client, place.kind)
        return BareServer(client.address, dialect, facts, place.seconds)

    server: BareServer = with_server(place, detected)
    return server
