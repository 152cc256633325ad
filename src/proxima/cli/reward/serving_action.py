"""`proxima reward serve`: serve a reward model over HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from proxima.cli.parameters import Argument
from proxima.data import UserError, require
from proxima.reward.server.scorer_limits import ScorerLimits
from proxima.system.machine import SERVER_REMEDY, missing_for_server

TOKEN_ENV = "environment variable with the bearer token that clients must send; required beyond this machine"
ALLOW_HOST = "a name by which clients address this server, beside localhost and --host; may be repeated"


def _limit(meaning: str) -> Argument:
    return Argument(f"{meaning}; default: %(default)s", "N", read=int, group="limits of a request")


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The options for `ScorerLimits`."""

    max_body_mb: Annotated[int, _limit("MiB of its body")] = ScorerLimits.body_mb
    max_completions: Annotated[int, _limit("completions in it")] = ScorerLimits.completions
    max_characters: Annotated[int, _limit("of a prompt or a completion")] = ScorerLimits.characters
    max_requests: Annotated[int, _limit("that wait at once")] = ScorerLimits.requests
    seconds: Annotated[float, _limit("until it is scored")] = ScorerLimits.seconds

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value >= 1, f"--{name.replace('_', '-')}", value, "must be >= 1")


def serve_reward(
    model: Annotated[str, Argument("a reward model: Hugging Face folder or hub name", "FOLDER")],
    *,
    host: Annotated[str, Argument("address to listen on; default: this machine alone")] = "127.0.0.1",
    port: Annotated[int, Argument("default: 8000; 0 takes a free one")] = 8000,
    token_env: Annotated[str | None, Argument(TOKEN_ENV, "NAME")] = None,
    allow_host: Annotated[Sequence[str], Argument(ALLOW_HOST, "NAME", words="append")] = (),
    normalize: Annotated[bool, Argument("scores with mean 0 and deviation 1 on held-out data")] = False,
    max_tokens: Annotated[int | None, Argument("most tokens of prompt and completion", "N")] = None,
    device: Annotated[str, Argument("auto, cpu, cuda, cuda:1")] = "auto",
    limits: RequestLimits = RequestLimits(),
) -> None:
    """Serve a reward model over HTTP until a signal stops it, for the reward `http` of other machines and processes."""
    if missing := missing_for_server():
        raise UserError(f"reward serve needs {missing}", remedy=SERVER_REMEDY)
    require(0 <= port <= 65535, "--port", port, "must be in [0, 65535]; 0 takes a free one")
    from proxima.model.compute_thread import ComputeThread
    from proxima.model.pretrained import quiet_transformers
    from proxima.reward.http import bearer_token
    from proxima.reward.model_reward import ModelReward
    from proxima.reward.server.bounded_server import BoundedServer, open_socket, require_secret
    from proxima.reward.server.scorer_app import ScorerApp
    from proxima.runtime.watch.interrupt import signals_restored

    scorer_limits = ScorerLimits(**{name.removeprefix("max_"): value for name, value in vars(limits).items()})
    token = "" if token_env is None else bearer_token(token_env, "--token-env")
    with open_socket(host, port) as listening, signals_restored():
        require_secret(listening, host, token, "token", "--token-env")
        reward = ModelReward(path=model, encode="text", normalize=normalize, max_tokens=max_tokens, device=device)
        with quiet_transformers():
            reward.check()
            reward.load()
        app = ScorerApp(reward, compute := ComputeThread(), scorer_limits, token, (host, *allow_host))
        server = BoundedServer(app.asgi, scorer_limits.read_seconds, scorer_limits.connections, app.ending)
        server.end_on_signals()
        listening.listen()  # before the line below: a client that reads it may send requests at once
        name = f"[{host}]" if ":" in host else host
        key = f", with the token of {token_env}" if token else ""
        print(f"{model} on http://{name}:{listening.getsockname()[1]}/score{key}  Ctrl-C stops it", flush=True)
        compute.serve(server.serve([listening]))
