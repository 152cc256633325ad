"""A server in a thread of this process, and clients of the real SDK."""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

os.environ |= {"TINKER_TELEMETRY": "0", "TINKER_API_KEY": "tml-for-tests"}


class Served:
    """A running server: its address, its `Service` and the lines of its log."""

    def __init__(self, folder: Path, model: Path, key: str = "", threads: int = 1, **settings: Any) -> None:
        from proxima.system.bounded_server import BoundedServer
        from proxima.system.listening import open_socket
        from proxima_tinker.served_settings import Settings
        from proxima_tinker.service import Service
        from proxima_tinker.service_app import ServiceApp

        self.log: list[str] = []
        self._loop = asyncio.new_event_loop()
        socket = open_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        chosen = {"dtype": "float32", "tokens": 256, **settings}
        ready = threading.Event()

        async def serve() -> None:
            settings = Settings(str(model), name="tests/tiny", folder=folder, **chosen)
            self.service = Service(settings, threads, self.log.append)
            self.service.restore()
            self.again = sum(len(model.waiting) for model in self.service.models.values())
            app = ServiceApp(self.service, key)
            self._server = BoundedServer(app.asgi, 30, 1000)
            socket.listen()
            ready.set()
            await self._server.serve([socket])
            await self.service.close()

        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(serve()), daemon=True)
        self._thread.start()
        assert ready.wait(60)

    def client(self, **settings: Any) -> Any:
        import tinker

        return tinker.ServiceClient(base_url=self.url, **settings)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)


@contextmanager
def running(folder: Path, model: Path, **settings: Any) -> Iterator[Served]:
    served = Served(folder, model, **settings)
    try:
        yield served
    finally:
        served.stop()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Any) -> Iterator[Served]:
    with running(tmp_path_factory.mktemp("served"), tiny_model("llama")) as server:
        yield server


@pytest.fixture
def trainer(served: Served) -> Any:
    """A client's model with adapters of rank 4."""
    return served.client().create_lora_training_client("tests/tiny", rank=4, seed=1).result()


@pytest.fixture(scope="module")
def base(tiny_model: Any) -> Any:
    """A model as the service loads it."""
    import torch

    from proxima.model.files import base_in_memory
    from proxima.model.load import load

    path = str(tiny_model("llama"))
    return replace(load(path, dtype=torch.float32, device="cpu"), base=base_in_memory(path, None, torch.float32))
