"""Serve a reward model over HTTP, for the reward `http` of other machines and processes.

proxima serve-reward models/reward --port 8000
proxima train quickstart reward='{kind: http, url: "http://localhost:8000/score"}'

export SCORER_TOKEN=…
proxima serve-reward models/reward --host 0.0.0.0 --token-env SCORER_TOKEN --allow-host scorer.lan
proxima train quickstart reward='{kind: http, url: "http://scorer.lan:8000/score", token_env: SCORER_TOKEN}'
"""

import argparse
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxima.reward.server.scorer_limits import ScorerLimits

LIMITS = {  # option: field of `ScorerLimits`, and what it means
    "--max-body-mb": ("body_mb", "MiB of its body"),
    "--max-completions": ("completions", "completions in it"),
    "--max-characters": ("characters", "of a prompt or a completion"),
    "--max-requests": ("requests", "that wait at once"),
    "--seconds": ("seconds", "until it is scored"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from proxima.reward.server.scorer_limits import ScorerLimits

    parser.add_argument("model", metavar="FOLDER", help="a reward model: Hugging Face folder or hub name")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: this machine alone")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 takes a free one")
    token = "environment variable with the bearer token that clients must send; required beyond this machine"
    parser.add_argument("--token-env", metavar="NAME", help=token)
    names = "a name by which clients address this server, beside localhost and --host; may be repeated"
    parser.add_argument("--allow-host", metavar="NAME", action="append", default=[], help=names)
    parser.add_argument("--normalize", action="store_true", help="scores with mean 0 and deviation 1 on held-out data")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of prompt and completion")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    limits = parser.add_argument_group("limits of a request")
    for option, (field, meaning) in LIMITS.items():
        default = getattr(ScorerLimits, field)
        help = f"{meaning}; default: {default}"
        limits.add_argument(option, dest=field, type=int, default=default, metavar="N", help=help)


def run(arguments: argparse.Namespace) -> int:
    from proxima.data import UserError, require
    from proxima.reward.server.scorer_limits import ScorerLimits

    if missing := [name for name in ("uvicorn", "starlette") if importlib.util.find_spec(name) is None]:
        raise UserError(f"serve-reward needs {' and '.join(missing)}", remedy="pip install 'proxima-rl[serve]'")
    require(0 <= arguments.port <= 65535, "--port", arguments.port, "must be in [0, 65535]; 0 takes a free one")
    values = {field: getattr(arguments, field) for field, _ in LIMITS.values()}
    for option, (field, _) in LIMITS.items():
        require(values[field] >= 1, option, values[field], "must be >= 1")
    return serve_reward(
        arguments.model,
        host=arguments.host,
        port=arguments.port,
        limits=ScorerLimits(**values),
        token_env=arguments.token_env,
        allow_hosts=arguments.allow_host,
        normalize=arguments.normalize,
        max_tokens=arguments.max_tokens,
        device=arguments.device,
    )


def serve_reward(
    model: str,
    *,
    host: str,
    port: int,
    limits: "ScorerLimits",
    token_env: str | None = None,
    allow_hosts: Sequence[str] = (),
    normalize: bool = False,
    max_tokens: int | None = None,
    device: str = "auto",
) -> int:
    """Serve a reward model until a signal; arguments as those of the command."""
    from proxima.model.compute_thread import ComputeThread
    from proxima.reward import ModelReward
    from proxima.reward.server.fair_queue import FairQueue
    from proxima.reward.server.scorer_app import ScorerApp
    from proxima.reward.server.scorer_listener import Listener, open_socket
    from proxima.runtime.watch.interrupt import quiet_transformers, signals_restored

    token = _token(host, token_env)
    with open_socket(host, port) as listening, signals_restored():
        reward = ModelReward(path=model, encode="text", normalize=normalize, max_tokens=max_tokens, device=device)
        with quiet_transformers():
            reward.check()
            reward.load()
        compute = ComputeThread()
        server = Listener(ScorerApp(FairQueue(reward, compute), limits, token, (host, *allow_hosts)))
        server.handle_signals()
        listening.listen()  # whoever reads the line may ask at once
        name = f"[{host}]" if ":" in host else host
        key = f", with the token of {token_env}" if token else ""
        print(f"{model} on http://{name}:{listening.getsockname()[1]}/score{key}  Ctrl-C ends it", flush=True)
        compute.serve(server.serve([listening]))
    return 0


def _token(host: str, token_env: str | None) -> str:
    """The token that clients must send; empty on the loopback, where none is needed."""
    from proxima.data import UserError
    from proxima.reward.http import bearer_token
    from proxima.reward.server.scorer_listener import beyond_loopback

    if token_env is not None:
        return bearer_token(token_env, "--token-env")
    if beyond_loopback(host):
        remedy = "give --token-env NAME, an environment variable with a bearer token, or listen on 127.0.0.1"
        raise UserError(f"--host={host!r} can be reached from other machines, and needs a token", remedy=remedy)
    return ""
