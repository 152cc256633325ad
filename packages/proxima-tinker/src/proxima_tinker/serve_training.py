"""Serve the trainer and the engine to programs written for the Tinker SDK.

    export TINKER_BASE_URL=http://127.0.0.1:8600 TINKER_API_KEY=tml-local

Models in training share the base's weights: an adapter each, or all weights. Everything that a client may need again is
in --folder, so that a server that was killed goes on where it was; `proxima view FOLDER/models/NAME` shows a model's
examples, token by token."""

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Annotated

from proxima.cli.parameters import Argument
from proxima.cli.reward import ALLOW_HOST
from proxima.data import require
from proxima.system.machine import usable_cores
from proxima_tinker.served_settings import Settings

MOST_CONNECTIONS = 4096
KEY_ENV = "environment variable with the API key that clients must send; required beyond this machine"


def serve_training(
    settings: Settings,
    *,
    host: Annotated[str, Argument("address to listen on; default: this machine alone")] = "127.0.0.1",
    port: Annotated[int, Argument("default: 8600; 0 takes a free one")] = 8600,
    key_env: Annotated[str | None, Argument(KEY_ENV, "NAME")] = None,
    allow_host: Annotated[Sequence[str], Argument(ALLOW_HOST, "NAME", words="append")] = (),
) -> None:
    """Serve until a signal stops it."""
    require(0 <= port <= 65535, "--port", port, "must be in [0, 65535]; 0 takes a free one")
    cores = usable_cores()
    require(settings.workers <= cores, "--workers", settings.workers, f"must be at most {cores}, this machine's cores")
    # here, so that --help and a mistyped option need neither torch nor a server
    import torch

    from proxima.model.compute_thread import ComputeThread
    from proxima.model.pretrained import without_progress_bars
    from proxima.reward.posting import bearer_token
    from proxima.runtime.watch.interrupt import signals_restored
    from proxima.system.bounded_server import BoundedServer, require_secret
    from proxima.system.listening import open_socket
    from proxima_tinker.service import Service
    from proxima_tinker.service_app import READ_SECONDS, ServiceApp

    key = ""
    if key_env is not None:
        key = bearer_token(key_env, "--key-env")
    sent = not key or (key.startswith("tml-") and len(key) >= 12)
    demand = "must hold at least 12 characters, of which the first are tml-, as the SDK demands"
    require(sent, "--key-env", key_env, demand)
    with open_socket(host, port) as listening, signals_restored():
        require_secret(listening, host, key, "key", "--key-env")
        with without_progress_bars():
            threads = torch.get_num_threads()  # OMP_NUM_THREADS, or one a core
            service = Service(settings, max(1, threads // settings.workers), _log)
        server = BoundedServer(ServiceApp(service, key, (host, *allow_host)).asgi, READ_SECONDS, MOST_CONNECTIONS)
        server.end_on_signals()
        shown = f"[{host}]" if ":" in host else host
        where = f"{service.name} on http://{shown}:{listening.getsockname()[1]}"

        async def serve() -> None:
            service.restore()
            again = sum(len(model.waiting) for model in service.models.values())
            models = len(service.models)
            listening.listen()
            goes_on = ""
            if models:
                goes_on = f", with {models} models of earlier; {again} requests run again"
            print(f"{where}{goes_on}  Ctrl-C stops it", flush=True)
            tidying = asyncio.create_task(service.tidy())
            await server.serve([listening])
            tidying.cancel()
            await service.close()

        ComputeThread().serve(serve())  # which a signal ends; this thread waits for it


def _log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


COMMAND = serve_training
