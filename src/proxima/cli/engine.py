"""Engines: install a server, start one for a recipe, query its capabilities, find what makes its mismatch.

proxima engine install vllm                               # into .venv-vllm, a dedicated environment
proxima engine serve quickstart engine=vllm               # a server for a recipe, until Ctrl-C
proxima engine probe http://127.0.0.1:8000                # the capabilities of a server
proxima engine diagnose quickstart engine=vllm            # what makes its mismatch"""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from proxima.cli.parameters import Argument, AsJson, Overrides, Recipe, print_json
from proxima.data import FieldError, UserError, require

INTO = "folder of the environment, created if it does not exist; default: .venv-vllm, .venv-sglang"
BUILD = "cpu, gpu, or auto, the default: gpu where this machine has one from NVIDIA"
LOG = "file that the server's output is appended to; default: runs/server.log"
TOKEN_ENV = "environment variable with the server's bearer token"
LOG_PROBS = {
    "processed": "of the distribution really sampled",
    "untruncated": "of softmax(logits / temperature), before top-k, top-p and min-p",
    "raw": "of softmax(logits), without temperature",
}


def install_server(
    kind: Annotated[Literal["vllm", "sglang"], Argument("the server")],
    *,
    into: Annotated[Path | None, Argument(INTO, "DIR")] = None,
    build: Annotated[Literal["auto", "cpu", "gpu"], Argument(BUILD)] = "auto",
) -> None:
    """Install a server into a dedicated virtual environment."""
    from proxima.engine.serve import launch, server_environment

    if build == "auto":
        build = "gpu" if launch.has_gpu() else "cpu"
    folder = (into or Path(launch.DEFAULT_ENVIRONMENT[kind])).expanduser()
    server_environment.ENVIRONMENTS[kind](folder, build, lambda line: print(line, flush=True)).install()


def serve_recipe(
    recipe: Recipe, override: Overrides = (), *, log: Annotated[Path, Argument(LOG, "FILE")] = Path("runs/server.log")
) -> None:
    """Start the server of a recipe, and keep it running.

    Raises:
        UserError: the recipe's engine is not a server, or the server can't start.
    """
    from proxima.cli.serving import serve_engine_of

    serve_engine_of(recipe, override, log.expanduser())


def probe_server(
    url: Annotated[str, Argument("the server's address: http://127.0.0.1:8000")],
    *,
    # those of `proxima.engine.http.detect.DIALECTS`, which needs numpy and httpx
    kind: Annotated[Literal["vllm", "sglang"] | None, Argument("what the server is; default: found by asking")] = None,
    token_env: Annotated[str | None, Argument(TOKEN_ENV, "NAME")] = None,
    allow_remote: Annotated[bool, Argument("the server may be on another machine")] = False,
    seconds: Annotated[float, Argument("deadline of a call; 60")] = 60.0,
    as_json: Annotated[bool, Argument("print the facts for programs", flag="--json")] = False,
) -> None:
    """Ask a server for its capabilities.

    Raises:
        UserError: the address is not valid, or a call failed.
    """
    if not 0 < seconds < float("inf"):
        raise UserError(f"--seconds {seconds:g}: must be > 0 and finite")
    from proxima.engine.http.detect import server_facts

    try:
        facts = asyncio.run(server_facts(url, token_env, allow_remote, kind, seconds))
    except FieldError as error:  # name the options of the command line
        text = str(error).replace("allow_remote=true", "--allow-remote").replace("token_env=", "--token-env ")
        raise UserError(text.replace(" token_env", " --token-env")) from error
    if as_json:
        print_json(facts)
    else:
        rows = list(fact_rows(facts))
        width = max(len(name) for name, _ in rows)
        print("\n".join(f"{name:<{width}}  {text}" for name, text in rows))


def diagnose_engine(
    recipe: Recipe,
    override: Overrides = (),
    *,
    prompts: Annotated[int, Argument("prompts of the task; 16")] = 16,
    samples: Annotated[int, Argument("answers to each prompt; 2")] = 2,
    tokens: Annotated[int, Argument("most tokens of an answer; 64")] = 64,
    as_json: AsJson = False,
) -> None:
    """Find the settings that move an engine's log-probs from the trainer's, one at a time; prints nats a token.

    Raises:
        UserError: the recipe or an option is wrong, before anything is loaded; or the engine can't start.
    """
    for name, value in (("--prompts", prompts), ("--samples", samples), ("--tokens", tokens)):
        require(value >= 1, name, value, "must be >= 1")
    require(
        prompts * samples >= 2, "--prompts", prompts, "must be >= 2 with one sample each: intervals need two answers"
    )
    from proxima.cli.engine_diagnosis import print_diagnosis

    print_diagnosis(recipe, override, prompts=prompts, samples=samples, tokens=tokens, as_json=as_json)


def fact_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each fact: `version spans`, `yes`."""
    for name, value in facts.items():
        if name == "more":
            yield from facts["more"].items()
        elif name == "sizes":
            yield "sizes", ", ".join(f"{part} {size}" for part, size in value.items()) or "not reported by the server"
        elif name == "log_probs":
            text = "none" if value is None else f"{value}: {LOG_PROBS[value]}"
            yield "log-probs", text
        else:
            yield name.replace("_", " "), _text(name, value)


def _text(name: str, value: Any) -> str:
    if value is None:
        return "none" if name == "quantization" else "not reported by the server"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


COMMAND = {"install": install_server, "serve": serve_recipe, "probe": probe_server, "diagnose": diagnose_engine}
