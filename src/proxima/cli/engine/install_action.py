"""`proxima engine install`: install a server into a dedicated virtual environment."""

from pathlib import Path
from typing import Annotated, Literal

from proxima.cli.parameters import Argument

INTO = "folder of the environment, created if it does not exist; default: .venv-vllm"
BUILD = "cpu, gpu, or auto, the default: gpu where this machine has one from NVIDIA"


def install_server(
    kind: Annotated[Literal["vllm"], Argument("the server")],
    *,
    into: Annotated[Path, Argument(INTO, "DIR")] = Path(".venv-vllm"),
    build: Annotated[Literal["auto", "cpu", "gpu"], Argument(BUILD)] = "auto",
) -> None:
    """Install a server into a dedicated virtual environment."""
    from proxima.engine.serve.launch import has_gpu
    from proxima.engine.serve.server_environment import ServerEnvironment

    if build == "auto":
        build = "gpu" if has_gpu() else "cpu"
    ServerEnvironment(into.expanduser(), build, lambda line: print(line, flush=True)).install()
