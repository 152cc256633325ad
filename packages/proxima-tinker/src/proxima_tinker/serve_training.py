"""Serve the trainer and the engine to programs written for the Tinker SDK.

    export TINKER_BASE_URL=http://127.0.0.1:8600 TINKER_API_KEY=tml-local

Models in training share the base's weights: an adapter each, or all weights. Everything that a client may need again is
in --folder, so that a server that was killed goes on where it was; `proxima view FOLDER/models/NAME` shows a model's
examples, token by token."""

import os
import resource
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from proxima.cli.parameters import Argument
from proxima.cli.reward.serving_action import ALLOW_HOST
from proxima.data import UserError, require
from proxima.system.machine import usable_cores

if TYPE_CHECKING:
    from proxima_tinker.service_app import ServiceApp

MOST_CONNECTIONS = 4096
KEY_ENV = "environment variable with the API key that clients must send; required beyond this machine"
NAME = "the name by which clients ask for the model; default: its path"
WORKERS = "calls of different clients that compute at the same time, on the cores divided by it; 1 is fastest for one"


def _count(meaning: str) -> Argument:
    return Argument(f"{meaning}; default: %(default)s", "N", read=int, group="counts")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The options that are numbers."""

    workers: Annotated[int, _count(WORKERS)] = 1
    tokens: Annotated[int, _count("of one forward pass of training")] = 4096
    slots: Annotated[int, _count("completions of one sampler at a time")] = 64
    engines: Annotated[int, _count("samplers in memory, a copy of the model each")] = 4
    models: Annotated[int, _count("models in memory; of more, those that nobody uses rest on disk")] = 16
    max_body_mb: Annotated[int, _count("MiB of a request")] = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(1 <= value <= 1 << 20, f"--{name.replace('_', '-')}", value, "must be in [1, 1048576]")


def serve_training(
    model: Annotated[str, Argument("Hugging Face folder or hub name, or a .gguf file", "MODEL")],
    *,
    folder: Annotated[str, Argument("state of models, and their records")] = "runs/served",
    name: Annotated[str | None, Argument(NAME)] = None,
    host: Annotated[str, Argument("address to listen on; default: this machine alone")] = "127.0.0.1",
    port: Annotated[int, Argument("default: 8600; 0 takes a free one")] = 8600,
    key_env: Annotated[str | None, Argument(KEY_ENV, "NAME")] = None,
    allow_host: Annotated[Sequence[str], Argument(ALLOW_HOST, "NAME", words="append")] = (),
    device: Annotated[str, Argument("auto, cpu, cuda, cuda:1")] = "auto",
    dtype: Annotated[str, Argument("of matrix products: bfloat16 or float32; weights are float32")] = "bfloat16",
    counts: Counts = Counts(),
) -> None:
    """Serve until a signal stops it."""
    require(dtype in ("bfloat16", "float32"), "--dtype", dtype, "must be bfloat16 or float32")
    require(0 <= port <= 65535, "--port", port, "must be in [0, 65535]; 0 takes a free one")
    cores = usable_cores()
    require(counts.workers <= cores, "--workers", counts.workers, f"must be at most {cores}, this machine's cores")
    key = _key(key_env)
    from proxima.model.quiet import quiet_transformers
    from proxima.reward.server.bounded_server import open_socket, require_secret
    from proxima.runtime.watch.interrupt import signals_restored
    from proxima_tinker.service import Service, Settings
    from proxima_tinker.service_app import ServiceApp

    numbers = {name: value for name, value in vars(counts).items() if name != "max_body_mb"}
    threads = max(1, cores // counts.workers)
    settings = Settings(
        path=model, name=name or model, folder=Path(folder), dtype=dtype, device=device, threads=threads, **numbers
    )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # those of the journal and of checkpoints must stay free
    connections = max(16, min(MOST_CONNECTIONS, files // 2))
    with open_socket(host, port) as listening, signals_restored():
        require_secret(listening, host, key, "key", "--key-env")
        with quiet_transformers():
            service = Service(settings, _log)
        app = ServiceApp(service, counts.max_body_mb, key, (host, *allow_host))
        shown = f"[{host}]" if ":" in host else host
        _serve(app, connections, listening, f"{settings.name} on http://{shown}:{listening.getsockname()[1]}")


def _serve(app: "ServiceApp", connections: int, listening: socket.socket, where: str) -> None:
    """Serve until a signal, which the main thread waits for."""
    import asyncio

    from proxima.model.compute_thread import ComputeThread
    from proxima.reward.server.bounded_server import BoundedServer
    from proxima_tinker.service_app import READ_SECONDS

    server, service = BoundedServer(app.asgi, READ_SECONDS, connections), app.service
    server.end_on_signals()

    async def serve() -> None:
        again = service.restore()
        listening.listen()
        models = len(service.models)
        goes_on = f", with {models} models of earlier; {again} requests run again" if models else ""
        print(f"{where}{goes_on}  Ctrl-C stops it", flush=True)
        tidying = asyncio.create_task(service.tidy())
        await server.serve([listening])
        tidying.cancel()
        await service.close()

    ComputeThread().serve(serve())


def _key(name: str | None) -> str:
    if name is None:
        return ""
    key = os.environ.get(name, "")
    if not key.startswith("tml-") or len(key) < 12:
        reason = "has no key of at least 12 characters that begins with tml-, as the SDK demands"
        raise UserError(f"--key-env={name}: the environment {reason}")
    return key


def _log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


COMMAND = serve_training
