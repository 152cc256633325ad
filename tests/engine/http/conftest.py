"""Engines over fakes of servers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from proxima.laws.engine_case import tiny_model
from proxima.model.load import load
from proxima.model.pretrained import LoadedModel
from tests.engine.http.plain_servers import engine_over, fakes, update


@pytest.fixture(autouse=True)
def _weights_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights for servers are not written to this machine's /dev/shm."""
    monkeypatch.setattr("proxima.engine.http.weights.weight_folders.SHARED_MEMORY", tmp_path)


@pytest.fixture(autouse=True)
def _no_other_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that is open is taken for broken off at once."""
    monkeypatch.setattr("proxima.engine.http.weights.to_vllm.UPDATE_POLLS", 0)
    monkeypatch.setattr("proxima.engine.http.weights.to_sglang.UPDATE_POLLS", 0)


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    """What the fakes of SGLang serve."""
    return tiny_model()


@pytest.fixture
def llama(tiny_model: Callable[[str], Path]) -> LoadedModel:
    """With tied embeddings; a test may change its weights."""
    return load(str(tiny_model("llama")), dtype=torch.float32, device="cpu")


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Any, list[Any]]]]:
    """`fleet(count, facts=…, rates=…, slow=…, published=…, **settings)`: an engine and the servers that it speaks to,
    with weights of version 1 if they are `published`; both end with the test. A server that answers, however slowly, is
    never given up: the limits of `replica` are minutes."""
    monkeypatch.setattr("proxima.engine.http.replica.ABORT_SECONDS", 300.0)
    monkeypatch.setattr("proxima.engine.http.replica_pool.CONFIRM_SECONDS", 300.0)
    monkeypatch.setattr("proxima.engine.http.replica_state.LONGEST_WAIT", 0.5)
    monkeypatch.setattr("proxima.engine.http.client.SHORTEST_BREAK", 0.01)

    with ExitStack() as opened:

        def start(count: int = 1, *, published: bool = False, **settings: Any) -> tuple[Any, list[Any]]:
            of_servers = {name: settings.pop(name) for name in ("facts", "rates", "slow") if name in settings}
            servers = fakes(count, **of_servers)
            engine = opened.enter_context(engine_over(servers, **settings))
            if published:
                engine._loop.call(engine._keeper.publish(update(1)))
            return engine, servers

        yield start
