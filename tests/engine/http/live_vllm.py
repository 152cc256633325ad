"""A real vLLM server for tests, and the trainer's side of it. PROXIMA_VLLM names the executable."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from proxima.engine import http

MODEL = Path("models/smollm2-135m-instruct")
EXECUTABLE = os.environ.get("PROXIMA_VLLM")
needs_vllm = pytest.mark.skipif(EXECUTABLE is None or not MODEL.is_dir(), reason="PROXIMA_VLLM names no vLLM")


@contextmanager
def live_server(folder: Path, *arguments: str, dtype: str = "float32", model: Path = MODEL) -> Iterator[str]:
    """The URL of a server that is ended with all its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    worker = str(Path(str(http.__file__)).parent / "in_server")
    more = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": worker}
    command = [str(EXECUTABLE), "serve", str(model.resolve()), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", dtype, "--enforce-eager", "--max-model-len", "1024", "--enable-scale-out"]
    command += ["--logprobs-mode", "processed_logprobs", "--worker-extension-cls", "proxima_vllm_worker.ProximaWorker"]
    command += ["--weight-transfer-config", '{"backend": "proxima_folder"}', *arguments]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            command, env=os.environ | more, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 600
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not start:\n{(folder / 'server.log').read_text()[-3000:]}")
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):  # what is left of its group
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
