"""Servers that proxima starts itself: their environment, command line, supervision and end.

`serve_options.py` is the section `engine.serve`. `server_environment.py` installs a server into an environment of its
own, because its versions of torch and transformers are not those of the trainer. `launch.py` has the command line, as
a user could type it; `server_process.py` is one server, started below `guardian.py`, which ends it with proxima;
`servers.py` has all of them and restarts what dies; `server_log.py` reads what they write.
Imports: httpx, `proxima.data`. Imported by `engine/http` and `cli`.
To add a server: a function beside `vllm_launch`, a line in `LAUNCHES`, and what installs it.
"""

import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from proxima.data import FieldError, UserError
from proxima.engine.serve.launch import Launch, find_executable, vllm_launch
from proxima.engine.serve.serve_options import Serve
from proxima.engine.serve.servers import Report, Servers, to_stderr

LAUNCHES: dict[str, Callable[..., Launch]] = {"vllm": vllm_launch}


def check_serve(kind: str, serve: Serve, *, model: str) -> None:
    """Look for what would keep the servers from starting, without starting one.

    Raises:
        FieldError: `executable` or `environment` has no server, `port` is taken, or a variable is not set; below
            `engine.serve`.
        UserError: proxima can't start this kind, no server is installed, or it can't load the model.
    """
    if kind not in LAUNCHES:
        known = ", ".join(LAUNCHES)
        raise UserError(f"proxima can't start {kind}, only {known}", remedy=f"start {kind} yourself and set engine.url")
    if model.endswith(".gguf"):
        remedy = "give a Hugging Face folder; `proxima export` and `make demo` write one"
        raise UserError(f"model.path={model!r}: {kind} is not given .gguf files", remedy=remedy)
    find_executable(serve, kind)
    for name in serve.variables:
        serve.environment_of(name)
    if serve.port:
        for port in range(serve.port, serve.port + serve.replicas):
            if not is_free(port):
                remedy = f"0 takes a free one; engine.url=http://127.0.0.1:{port} uses a server that is running"
                raise FieldError("port", serve.port, f"is in use on 127.0.0.1: {port}", remedy=remedy)


def start_servers(
    kind: str,
    serve: Serve,
    *,
    model: str,
    max_length: int | None = None,
    quantization: str | None = None,
    sampling_mask: bool = False,
    key: str | None = None,
    log: Path | None = None,
    report: Report = to_stderr,
) -> Servers:
    """Start the servers of an engine; returns when all answer, after half a minute or more.

    Args:
        kind: of the engine, `vllm`.
        serve: the section `engine.serve`.
        model: hub name or folder; a server loads it by itself.
        max_length: tokens of prompt and completion together, where `serve` does not say; None: the model's own.
        quantization: of the weights, as the server calls it.
        sampling_mask: completions come with the tokens that could be sampled.
        key, log, report: see `Servers`.

    Raises:
        FieldError, UserError: as `check_serve`, or a server did not start.
    """
    check_serve(kind, serve, model=model)
    place = os.path.expanduser(model)
    reserved = ExitStack()
    made = [
        LAUNCHES[kind](
            serve,
            os.path.abspath(place) if os.path.exists(place) else model,
            port,
            max_length=max_length,
            quantization=quantization,
            sampling_mask=sampling_mask,
        )
        for port in ports_for(serve, reserved)
    ]
    for one in made:
        report(f"$ {one.by_hand}")
    return Servers(made, serve, key=key, log=log, report=report, reserved=reserved).start()


def ports_for(serve: Serve, reserved: ExitStack) -> list[int]:
    """A port for each server: those that are asked for, or free ones.

    Args:
        reserved: gets the sockets that reserve free ports, also between two starts of a server. They are bound but do
            not listen, so Linux still lets the server listen on the port.
    """
    if serve.port:
        return list(range(serve.port, serve.port + serve.replicas))
    sockets = [reserved.enter_context(socket.socket()) for _ in range(serve.replicas)]
    for one in sockets:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", 0))
    found = [one.getsockname()[1] for one in sockets]
    if sys.platform != "linux":  # elsewhere they would keep the servers away too
        reserved.close()
    return found


def is_free(port: int) -> bool:
    """Whether a server could listen on a port of 127.0.0.1."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


__all__ = ["Report", "Serve", "Servers", "check_serve", "start_servers"]
