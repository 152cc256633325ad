"""`proxima engine install`: a server into a virtual environment of its own."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("vllm",), help="the server")
    into = "folder of the environment, made if it is not there; default: .venv-vllm"
    parser.add_argument("--into", metavar="DIR", default=".venv-vllm", help=into)
    build = "cpu, gpu, or auto, the default: gpu where this machine has one from NVIDIA"
    parser.add_argument("--build", choices=("auto", "cpu", "gpu"), default="auto", help=build)


def run(arguments: argparse.Namespace) -> int:
    return install_server(Path(arguments.into), arguments.build)


def install_server(folder: Path, build: str = "auto") -> int:
    """Install a server into an environment of its own; `build` is cpu, gpu or auto."""
    from proxima.engine.serve.launch import has_gpu
    from proxima.engine.serve.server_environment import ServerEnvironment

    if build == "auto":
        build = "gpu" if has_gpu() else "cpu"
    ServerEnvironment(folder.expanduser(), build, lambda line: print(line, flush=True)).install()
    return 0
