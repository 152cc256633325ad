"""Look into runs in a browser: curves, steps, groups, completions, and why a token was masked.

proxima view runs/quickstart
proxima view runs/a runs/b --port 8080 --no-browser
proxima view runs/quickstart --export 12
"""

import re
import secrets
import sys
import webbrowser
from collections.abc import Sequence
from typing import Annotated

from proxima.cli.parameters import Argument
from proxima.data import UserError, require
from proxima.system.machine import SERVER_REMEDY, missing_for_server
from proxima.system.web_requests import is_loopback
from proxima.view.microscope import PORT

EXPORT = "write one file that shows a step, or the completions of a prompt (UID or STEP/UID), and end"
HOST = "name or address of this machine to listen on; beyond this machine the address has a key. default: %(default)s"


def view(
    runs: Annotated[Sequence[str], Argument("runs, finished, running or killed, or folders of them", "RUN", words="+")],
    *,
    port: Annotated[int, Argument("default: %(default)s or, if it is taken, any; 0: any", "N")] = PORT,
    host: Annotated[str, Argument(HOST, "NAME")] = "127.0.0.1",
    key: Annotated[str | None, Argument("the key, in place of a new one", "TEXT")] = None,
    no_browser: Annotated[bool, Argument("print the address, and open nothing")] = False,
    recompute: Annotated[bool, Argument("compute what was not stored from model and checkpoints; loads them")] = False,
    export: Annotated[str | None, Argument(EXPORT, "STEP|UID")] = None,
) -> None:
    """Serve the page until a signal stops it."""
    missing = missing_for_server()
    if missing:
        raise UserError(f"view needs {missing}", remedy=SERVER_REMEDY)
    require(0 <= port <= 65535, "--port", port, "must be in [0, 65535]; 0 takes a free one")
    plain = key is None or bool(re.fullmatch(r"[\w.~-]+", key, re.ASCII))
    require(plain, "--key", key, "must have letters, digits and . _ ~ - alone: it is a part of the address")
    from proxima.view.microscope import app, exported_page, server

    viewed = server.open_runs(runs, recompute=recompute)
    if export is not None:
        require(len(viewed) == 1, "--export", export, "is for one run")
        file = exported_page.write_exported_page(viewed[0], export)
        return print(f"wrote {file}")
    otherwise = 0 if port == PORT else None
    with server.listen(host, port, otherwise=otherwise) as listening:
        secret = key or ""
        if not secret and not is_loopback(listening.getsockname()[0]):
            secret = secrets.token_urlsafe(16)
        address = server.address_of(listening, host, secret)
        print(f"{address}  Ctrl-C stops it", flush=True)
        if not no_browser and sys.stdout.isatty():
            webbrowser.open(address)
        server.serve_pages(app.MicroscopeApp(viewed, secret, host), listening)


COMMAND = view
