"""The end of a rank at its connection to rank 0; the process that it would exit is the test's."""

import itertools
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from proxima.runtime.placement import rank_messages
from proxima.runtime.placement.rank_messages import Lifeline
from tests.processes import eventually
from tests.runtime.placement.test_rank_watch import IDLE, watching

pytestmark = pytest.mark.slow


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes of the rank, of which there is one at most."""
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setattr(rank_messages, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(rank_messages, "GRACE", 0.01)
    return codes


def connected(port: int, token: str = "") -> Lifeline:
    ranks: Any = SimpleNamespace(rank=1, status=SimpleNamespace(beat=lambda: IDLE))
    return Lifeline(("127.0.0.1", port), token, ranks, {}, 600.0)


@pytest.mark.parametrize("done", [False, True])
def test_a_rank_ends_with_rank_0_and_is_done_only_then(done: bool, exits: list[int]) -> None:
    with watching(2) as watch:
        line = connected(watch.port, watch.token)
        watch.meet(600)
        eventually(lambda: watch.peers[1].beat)
        closing = threading.Thread(target=line.close)
        if done:
            closing.start()
            eventually(lambda: watch.peers[1].gone)
            assert closing.is_alive()
        assert watch.failure is None and exits == []
    if done:
        closing.join()
    line._thread.join()
    assert exits == [1] * (not done)


def test_a_rank_0_that_is_silent_is_named_and_then_given_up(
    exits: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seconds = itertools.count(step=50)
    monkeypatch.setattr(rank_messages, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(rank_messages, "SEND_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        connected(server.getsockname()[1])._thread.join()
    assert exits == [1] and capfd.readouterr().err == "rank 0 has not responded for 50 s\n"
