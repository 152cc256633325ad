"""`proxima engine serve`: run the server of a recipe in the foreground."""

import os
import shlex
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

from proxima.cli.output import Overrides, Recipe
from proxima.cli.parameters import Argument

KEY = "PROXIMA_ENGINE_KEY"
LOG = "file that the server's output is appended to; default: runs/server.log"


def serve_recipe(
    recipe: Recipe, override: Overrides = (), *, log: Annotated[Path, Argument(LOG, "FILE")] = Path("runs/server.log")
) -> None:
    """Start the server of a recipe, and keep it running.

    Raises:
        UserError: the recipe's engine is not a server, or the server can't start.
    """
    from proxima.config.resolution import resolve
    from proxima.config.sections.model_section import model_problem
    from proxima.config.validate import fetch_demo_model
    from proxima.data.errors import FieldError, within
    from proxima.engine.serve.servers import check_serve, start_servers
    from proxima.model.pretrained import load_config

    resolved = resolve(recipe, override, root=None)
    config: Any = resolved.config
    with resolved.locating():
        serve, kind = serve_section(config)
        with within("engine.serve"):
            check_serve(kind, serve, model=config.model.path)
        if remedy := model_problem(config.model.path):  # else the server would start, load its packages, and fail
            raise FieldError("model.path", config.model.path, remedy)
        fetch_demo_model(config.model.path)
        load_config(config.model.path, config.model.revision)  # reads the config alone, also of a model on the hub
        with within("engine.serve"):
            servers = start_servers(
                kind,
                serve,
                model=config.model.path,
                max_length=config.model.max_length,
                key=key_of(config.engine),
                log=log.expanduser(),
                report=lambda line: print(line, flush=True),
                **config.engine.launch_options,
            )
    with closing(servers):
        try:
            print(f"log      {servers.started[0].log}")
            print(f"train    {how_to_train([recipe, *override], config.engine, servers.urls, servers.token)}")
            print("Ctrl-C stops it", flush=True)
            raise servers.wait()
        except KeyboardInterrupt:
            print("stopping the server", flush=True)


def serve_section(config: Any) -> "tuple[Any, str]":
    """`engine.serve` and the kind of the engine; if the recipe names servers by URL, a section for those.

    Raises:
        FieldError: the engine is not a server, a server is on another machine, or the ports are not consecutive.
    """
    from urllib.parse import urlsplit

    from proxima.data import FieldError
    from proxima.engine import ENGINES
    from proxima.engine.http.engine import ServerSpec
    from proxima.engine.serve.launch import Serve
    from proxima.system.web_requests import is_loopback

    engine = config.engine
    kind = ENGINES.kind_of(engine)
    if not isinstance(engine, ServerSpec):
        raise FieldError("engine.kind", kind, "is not a server", remedy="set engine=vllm")
    if engine.serve is not None:
        return engine.serve, kind
    places = [urlsplit(url) for url in engine.urls]
    ports = [place.port or 80 for place in places]
    if not all(is_loopback(place.hostname or "") for place in places):
        raise FieldError("engine.url", engine.url, "is on another machine", remedy="start the server there")
    if ports != list(range(ports[0], ports[0] + len(ports))):
        raise FieldError("engine.url", engine.url, "must have consecutive ports to be started together")
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
