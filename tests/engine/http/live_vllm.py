"""A real vLLM server for tests, and the trainer's side of it. PROXIMA_VLLM names the executable."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from proxima.engine.serve.launch import Serve
from proxima.engine.serve.servers import start_servers

MODEL = Path("models/smollm2-135m-instruct")
EXECUTABLE = os.environ.get("PROXIMA_VLLM")
needs_vllm = pytest.mark.skipif(EXECUTABLE is None or not MODEL.is_dir(), reason="PROXIMA_VLLM names no vLLM")


@contextmanager
def live_server(folder: Path, *arguments: str, dtype: str = "float32", model: Path = MODEL) -> Iterator[str]:
    """The URL of a server that is ended with all its processes."""
    serve = Serve(executable=EXECUTABLE, dtype=dtype, eager=True, threads=1, arguments=arguments)
    log = folder / "server.log"
    with closing(start_servers("vllm", serve, model=str(model), key="", max_length=1024, log=log)) as servers:
        yield servers.urls[0]
