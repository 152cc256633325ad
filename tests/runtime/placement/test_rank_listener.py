"""Connections of others than ranks at the port where rank 0 awaits them."""

import errno
import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from proxima.runtime.placement import rank_listener
from proxima.runtime.placement.rank_listener import STRANGERS, listener_addresses, listening_socket
from proxima.runtime.placement.rank_watch import RankWatch
from tests.processes import eventually
from tests.runtime.placement.test_rank_watch import call, is_hung_up, watching

LONG = 600.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine no token is overdue unless a test says so."""
    monkeypatch.setattr(rank_listener, "TOKEN_SECONDS", LONG)
    monkeypatch.setattr(rank_listener, "CROWDED_SECONDS", LONG)


@contextmanager
def strangers(watch: RankWatch, number: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as opened:
        address = ("127.0.0.1", watch.port)
        yield [opened.enter_context(socket.create_connection(address)) for _ in range(number)]


def ended(client: socket.socket) -> bool:
    return is_hung_up(SimpleNamespace(connection=client))  # type: ignore[arg-type]


SENT = {
    "deep JSON": b"[" * 200_000 + b"\n",
    "no end of a line": b"x" * (1 << 22),
    "a hello": b'{"hello": 1, "token": "", "host": "", "facts": {}}\n',
    "NUL": bytes(100),
    "no UTF-8": b"\xff" * 100,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "HTTP": b"GET / HTTP/1.1\r\nHost: rank0:29500\r\n\r\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SENT)
def test_nothing_is_read_beyond_a_wrong_token(name: str) -> None:
    with watching(2) as watch, strangers(watch, 1) as (stranger,):
        with suppress(ConnectionError):
            stranger.sendall(SENT[name])
        assert ended(stranger)
        rank = call(watch, 1)
        assert [*watch.meet(LONG)] == [1]
        rank.connection.close()


def test_a_token_may_come_in_parts_and_is_needed_whole() -> None:
    with watching(2) as watch, strangers(watch, 3) as (rank, half, reset):
        half.sendall(watch.token[:31].encode())
        half.shutdown(socket.SHUT_WR)
        assert ended(half)
        reset.sendall(watch.token[:31].encode())
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
        reset.close()
        for letter in watch.token:
            rank.sendall(letter.encode())
        rank.sendall(b'{"hello": 1, "host": "node", "facts": {}}\n')
        assert [*watch.meet(LONG)] == [1]


def test_a_token_that_does_not_come_is_not_awaited_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_listener, "TOKEN_SECONDS", 0.05)
    with watching(2) as watch, strangers(watch, 2) as (silent, slow):
        slow.sendall(watch.token[:1].encode())
        assert ended(silent) and ended(slow)
        eventually(lambda: not watch._listener.strangers)


def test_strangers_are_bounded_and_do_not_keep_a_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with watching(2) as watch, strangers(watch, 3 * STRANGERS):
        eventually(lambda: len(watch._listener.strangers) == STRANGERS)
        rank = call(watch, 1)  # behind them in the kernel's queue
        assert not watch.peers and len(watch._listener.strangers) == STRANGERS
        monkeypatch.setattr(rank_listener, "CROWDED_SECONDS", 0.0)
        assert [*watch.meet(LONG)] == [1]
        rank.connection.close()


def test_a_process_without_descriptors_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank comes once there is one; it is said once."""
    monkeypatch.setattr(rank_listener, "BACK_OFF_SECONDS", 0.01)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = list[str]()
    with watching(2) as watch, socket.socket() as client:
        watch._warn = said.append
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
        held = list[int]()
        try:
            with suppress(OSError):
                while True:
                    held.append(os.dup(0))
            client.connect(("127.0.0.1", watch.port))
            client.sendall(watch.token.encode() + b'{"hello": 1, "host": "node", "facts": {}}\n')
            eventually(lambda: said)
            assert not watch.peers
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in held:
                os.close(descriptor)
        assert [*watch.meet(LONG)] == [1]
    assert said == [f"rank 0 can't accept a connection yet: {os.strerror(errno.EMFILE)}; see `ulimit -n`"]


@pytest.mark.slow
def test_strangers_leave_no_descriptors() -> None:
    with watching(2) as watch:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with strangers(watch, 20) as opened:
                for stranger in opened:
                    with suppress(ConnectionError):
                        stranger.sendall(b"x" * 40)
                assert all(map(ended, opened))
        eventually(lambda: len(os.listdir("/proc/self/fd")) == before)
        assert any(thread.name == "proxima-ranks" for thread in threading.enumerate())


ONE_NODE = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node1"}
ADDRESSES: list[tuple[dict[str, str], tuple[str, str]]] = [
    (ONE_NODE, ("127.0.0.1", "127.0.0.1")),
    (ONE_NODE | {"MASTER_ADDR": "10.1.2.3"}, ("127.0.0.1", "127.0.0.1")),
    (ONE_NODE | {"LOCAL_WORLD_SIZE": "2"}, ("", "node1")),
    (ONE_NODE | {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.1.2.3"}, ("10.1.2.3", "10.1.2.3")),
    (ONE_NODE | {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "fd00::1"}, ("fd00::1", "fd00::1")),
    ({"WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}, ("", "localhost")),
]


@pytest.mark.parametrize(("variables", "addresses"), ADDRESSES)
def test_where_ranks_meet(variables: dict[str, str], addresses: tuple[str, str]) -> None:
    assert listener_addresses(variables) == addresses


@pytest.mark.parametrize(("host", "listens"), [("127.0.0.1", "127.0.0.1"), ("192.0.2.1", ""), ("", "")])
def test_rank_0_listens_on_one_address_if_it_has_it(host: str, listens: str) -> None:
    """The second one, as in a container whose ports are forwarded."""
    with listening_socket(host) as listening:
        place: Any = listening.getsockname()[0]
        assert place == listens or (not listens and place in ("::", "0.0.0.0"))
        socket.create_connection(("127.0.0.1", listening.getsockname()[1])).close()
