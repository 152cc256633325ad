"""Serve the trainer and the engine to programs written for the Tinker SDK.

    export TINKER_BASE_URL=http://127.0.0.1:8600 TINKER_API_KEY=tml-local

Models in training share the base's weights: an adapter each, or all weights. Everything that a client may need again is
in --folder, so that a server that was killed goes on where it was; `proxima view FOLDER/models/NAME` shows a model's
examples, token by token."""

import ipaddress
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from proxima.cli.parameters import Argument
from proxima.data import UserError, require

KEY_ENV = "environment variable with the API key that clients must send; required beyond this machine"
ALLOW_HOST = "a name by which clients address this server, beside localhost and --host; may be repeated"
NAME = "the name by which clients ask for the model; default: its path"
WORKERS = "calls of different clients that compute at the same time, on the cores divided by it; 1 is fastest for one"


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
    workers: Annotated[int, Argument(WORKERS, "N")] = 1,
    tokens: Annotated[int, Argument("of one forward pass of training", "N")] = 4096,
    slots: Annotated[int, Argument("completions of one sampler at a time", "N")] = 64,
    engines: Annotated[int, Argument("samplers in memory, a copy of the model each", "N")] = 4,
    snapshots: Annotated[int, Argument("unnamed weights for samplers that are kept for each model", "N")] = 8,
    models: Annotated[int, Argument("models in memory; of more, those that nobody uses rest on disk", "N")] = 16,
    max_requests: Annotated[int, Argument("of a model or a sampler that wait at once", "N")] = 1024,
    max_body_mb: Annotated[int, Argument("MiB of a request", "N")] = 64,
) -> None:
    """Serve until a signal stops it."""
    require(dtype in ("bfloat16", "float32"), "--dtype", dtype, "must be bfloat16 or float32")
    require(0 <= port <= 65535, "--port", port, "must be in [0, 65535]; 0 takes a free one")
    counts = {"workers": workers, "tokens": tokens, "slots": slots, "engines": engines, "snapshots": snapshots}
    for option, count in (
        counts | {"models": models, "max-requests": max_requests, "max-body-mb": max_body_mb}
    ).items():
        require(1 <= count <= 1 << 20, f"--{option}", count, "must be in [1, 1048576]")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    require(workers <= cores, "--workers", workers, f"must be at most {cores}, the cores of this machine")
    key = _key(key_env)

    import asyncio

    from proxima.model.compute_thread import ComputeThread
    from proxima.model.quiet import quiet_transformers
    from proxima.reward.server.bounded_server import BoundedServer, open_socket
    from proxima.runtime.watch.interrupt import signals_restored
    from proxima_tinker.app import READ_SECONDS, ServiceApp, ServiceLimits
    from proxima_tinker.service import Service, Settings

    settings = Settings(
        path=model,
        name=name or model,
        folder=Path(folder),
        dtype=dtype,
        device=device,
        tokens=tokens,
        slots=slots,
        workers=workers,
        threads=max(1, cores // workers),
        engines=engines,
        snapshots=snapshots,
        waiting=max_requests,
        models=models,
    )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # those of the journal and of checkpoints must stay free
    limits = ServiceLimits(body_mb=max_body_mb, connections=max(16, min(ServiceLimits.connections, files // 2)))
    with open_socket(host, port) as listening, signals_restored():
        if not key and not ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback:
            remedy = "give --key-env NAME, an environment variable with a key, or listen on 127.0.0.1"
            raise UserError(f"--host={host!r} can be reached from other machines, and needs a key", remedy=remedy)

        with quiet_transformers():
            service = Service(settings, _log)
        app = ServiceApp(service, limits, key, (host, *allow_host))
        server = BoundedServer(app.asgi, READ_SECONDS, limits.connections)
        server.end_on_signals()
        shown = f"[{host}]" if ":" in host else host

        async def serve() -> None:
            again = service.restore()
            listening.listen()
            models = len(service.models)
            goes_on = f", with {models} models of earlier; {again} requests run again" if models else ""
            address = f"http://{shown}:{listening.getsockname()[1]}"
            print(f"{settings.name} on {address}{goes_on}  Ctrl-C stops it", flush=True)
            tidying = asyncio.create_task(service.tidy())
            await server.serve([listening])
            tidying.cancel()
            await service.close()

        ComputeThread().serve(serve())  # the main thread waits for signals


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
