"""Serve a reward model over HTTP, for the reward `http` of other machines and processes.

proxima serve-reward models/reward --port 8000
proxima train quickstart reward='{kind: http, url: "http://localhost:8000/score"}'

export SCORER_TOKEN=…
proxima serve-reward models/reward --host 0.0.0.0 --token-env SCORER_TOKEN --allow-host scorer.lan
proxima train quickstart reward='{kind: http, url: "http://scorer.lan:8000/score", token_env: SCORER_TOKEN}'
"""

import argparse
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxima.reward.server.scorer_limits import ScorerLimits


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    limits.add_argument("--max-body-mb", type=int, default=16, metavar="N", help="MiB of its body; default: 16")
    limits.add_argument("--max-completions", type=int, default=4096, metavar="N", help="default: 4096")
    limits.add_argument(
        "--max-characters", type=int, default=200_000, metavar="N", help="of a prompt or a completion; default: 200000"
    )
    limits.add_argument("--max-requests", type=int, default=64, metavar="N", help="that wait at once; default: 64")
    limits.add_argument("--seconds", type=int, default=300, metavar="N", help="until it is scored; default: 300")


def run(arguments: argparse.Namespace) -> int:
    from proxima.data import UserError, require

    if missing := [name for name in ("uvicorn", "starlette") if importlib.util.find_spec(name) is None]:
        raise UserError(f"serve-reward needs {' and '.join(missing)}", remedy="pip install 'proxima-rl[serve]'")
    from proxima.model.compute_thread import ComputeThread
    from proxima.reward import ModelReward
    from proxima.reward.server.fair_queue import FairQueue
    from proxima.reward.server.scorer_app import ScorerApp
    from proxima.reward.server.scorer_listener import Listener, open_socket
    from proxima.runtime.watch.interrupt import quiet_transformers, signals_restored

    require(0 <= arguments.port <= 65535, "--port", arguments.port, "must be in [0, 65535]; 0 takes a free one")
    limits, token = _limits(arguments), _token(arguments)
    with open_socket(arguments.host, arguments.port) as listening, signals_restored():
        reward = ModelReward(
            path=arguments.model,
            encode="text",
            normalize=arguments.normalize,
            max_tokens=arguments.max_tokens,
            device=arguments.device,
        )
        with quiet_transformers():
            reward.check()
            reward.load()
        compute = ComputeThread()
        app = ScorerApp(FairQueue(reward, compute), limits, token, (arguments.host, *arguments.allow_host))
        server = Listener(app)
        server.handle_signals()
        listening.listen()  # whoever reads the line may ask at once
        name = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        key = f", with the token of {arguments.token_env}" if token else ""
        print(f"{arguments.model} on http://{name}:{listening.getsockname()[1]}/score{key}  Ctrl-C ends it", flush=True)
        compute.serve(server.serve([listening]))
    return 0


def _limits(arguments: argparse.Namespace) -> "ScorerLimits":
    from proxima.data import require
    from proxima.reward.server.scorer_limits import ScorerLimits

    values = {"seconds": arguments.seconds}
    require(arguments.seconds >= 1, "--seconds", arguments.seconds, "must be >= 1")
    for name in ("body_mb", "completions", "characters", "requests"):
        values[name] = getattr(arguments, f"max_{name}")
        require(values[name] >= 1, f"--max-{name.replace('_', '-')}", values[name], "must be >= 1")
    return ScorerLimits(**values)


def _token(arguments: argparse.Namespace) -> str:
    """The token that clients must send; empty on the loopback, where none is needed."""
    from proxima.data import UserError
    from proxima.reward.http import bearer_token
    from proxima.reward.server.scorer_listener import beyond_loopback

    if arguments.token_env is not None:
        return bearer_token(arguments.token_env, "--token-env")
    if beyond_loopback(arguments.host):
        remedy = "give --token-env NAME, an environment variable with a bearer token, or listen on 127.0.0.1"
        raise UserError(
            f"--host={arguments.host!r} can be reached from other machines, and needs a token", remedy=remedy
        )
    return ""
