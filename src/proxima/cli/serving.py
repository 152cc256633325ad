"""Starts the servers of `proxima engine serve` and `proxima reward serve`, and waits until they are stopped."""

import os
import shlex
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from proxima.config.resolution import resolve
from proxima.config.sections.model import model_problem
from proxima.config.validate import fetch_demo_model
from proxima.data.errors import FieldError, within
from proxima.engine import ENGINES
from proxima.engine.http.engine import ServerSpec
from proxima.engine.serve.launch import Serve
from proxima.engine.serve.servers import check_serve, start_servers
from proxima.model.architecture import TextConfig
from proxima.model.compute_thread import ComputeThread
from proxima.model.pretrained import load_config, without_progress_bars
from proxima.reward.model_reward import ModelReward
from proxima.reward.posting import bearer_token
from proxima.reward.server.scorer_app import ScorerApp
from proxima.reward.server.scorer_limits import ScorerLimits
from proxima.runtime.watch.interrupt import signals_restored
from proxima.system.bounded_server import BoundedServer, require_secret
from proxima.system.listening import open_socket
from proxima.system.web_requests import is_loopback

KEY = "PROXIMA_ENGINE_KEY"


def serve_engine_of(recipe: str, overrides: Sequence[str], log: Path) -> None:
    """Start the server of a recipe, and keep it running.

    Raises:
        UserError: the recipe's engine is not a server, or the server can't start.
    """
    resolved = resolve(recipe, overrides, root=None)
    config: Any = resolved.config
    with resolved.locating():
        serve, kind = serve_section(config)
        with within("engine.serve"):
            check_serve(kind, serve, model=config.model.path)
        remedy = model_problem(config.model.path)
        if remedy:  # else the server would start, load its packages, and fail
            raise FieldError("model.path", config.model.path, remedy)
        fetch_demo_model(config.model.path)
        # reads the config alone, also of a model on the hub
        limit = TextConfig.of(load_config(config.model.path, config.model.revision)).positions
        with within("engine.serve"):
            servers = start_servers(
                kind,
                serve,
                model=config.model.path,
                max_length=config.model.max_length or limit,
                key=key_of(config.engine),
                log=log,
                report=lambda line: print(line, flush=True),
                **config.engine.launch_options(config.model.adapter_rank),
            )
    with closing(servers):
        try:
            print(f"log      {servers.started[0].log}")
            print(f"train    {how_to_train([recipe, *overrides], config.engine, servers.urls, servers.token)}")
            print("Ctrl-C stops it", flush=True)
            raise servers.wait()
        except KeyboardInterrupt:
            print("stopping the server", flush=True)


def serve_section(config: Any) -> tuple[Any, str]:
    """`engine.serve` and the kind of the engine; if the recipe names servers by URL, a section for those.

    Raises:
        FieldError: the engine is not a server, a server is on another machine, or the ports are not consecutive.
    """
    engine = config.engine
    kind = ENGINES.kind_of(engine)
    if not isinstance(engine, ServerSpec):
        raise FieldError("engine.kind", kind, "is not a server", remedy="set engine=vllm")
    if engine.serve is not None:
        return engine.serve, kind
    with within("engine"):  # it may be a file
        places = [urlsplit(url) for url in engine.urls]
    ports = [place.port or 80 for place in places]
    if not all(is_loopback(place.hostname or "") for place in places):
        raise FieldError("engine.url", engine.url, "is on another machine", remedy="start the server there")
    if ports != list(range(ports[0], ports[0] + len(ports))):
        raise FieldError("engine.url", engine.url, "must have consecutive ports to be started together")
    if ports[0] < 1024:
        raise FieldError("engine.url", engine.url, "must have a port in 1024..65535 for a server to be started")
    return Serve(port=ports[0], replicas=len(ports)), kind


def key_of(engine: Any) -> str | None:
    """The key that clients of this recipe send: the value of `token_env`; empty, for no key, if the recipe gives only a
    URL; else None, for a new key."""
    if engine.token_env is not None:
        return os.environ.get(engine.token_env, "")
    return None if engine.serve is not None else ""


def how_to_train(given: Sequence[str], engine: Any, urls: tuple[str, ...], key: str) -> str:
    """The command that trains the recipe on these servers from another terminal."""
    words = ["proxima", "train", *given]
    if engine.serve is None:
        return shlex.join(words)
    url = urls[0] if len(urls) == 1 else f"[{', '.join(urls)}]"
    words += ["engine.serve=null", f"engine.url={url}"]
    if engine.token_env is not None:
        return shlex.join(words)
    return f"{KEY}={key} {shlex.join([*words, f'engine.token_env={KEY}'])}"


def serve_scores(
    model: str,
    limits: ScorerLimits,
    *,
    host: str,
    port: int,
    token_env: str | None,
    allow_host: Sequence[str],
    normalize: bool,
    max_tokens: int | None,
    device: str,
) -> None:
    """Serve a reward model over HTTP until a signal stops it."""
    token = "" if token_env is None else bearer_token(token_env, "--token-env")
    with open_socket(host, port) as listening, signals_restored():
        require_secret(listening, host, token, "token", "--token-env")
        reward = ModelReward(path=model, encode="text", normalize=normalize, max_tokens=max_tokens, device=device)
        with without_progress_bars():
            reward.check()
            reward.load()
        compute = ComputeThread()
        app = ScorerApp(reward, compute, limits, token, (host, *allow_host))
        server = BoundedServer(app.asgi, limits.read_seconds, limits.connections, app.ending)
        server.end_on_signals()
        listening.listen()  # before the line below: a client that reads it may send requests at once
        name = f"[{host}]" if ":" in host else host
        key = f", with the token of {token_env}" if token else ""
        print(f"{model} on http://{name}:{listening.getsockname()[1]}/score{key}  Ctrl-C stops it", flush=True)
        compute.serve(server.serve([listening]))
