"""Every port that is opened, and what strangers send there."""

import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from proxima.core import SURROGATES
from tests.processes import eventually
from tests.runtime.placement.test_rank_watch import IDLE, met
from tests.strangers import KINDS, OF_ANY_PORT, Stranger, descriptors, visited
from tests.system.test_web_requests import SERVERS, sent
from tests.view.microscope import stored_run

HELD_MIB = 100.0  # at most, more than before
KEYS = {"view": "", "scorer": "", "agents": "Authorization: Bearer an-episode\r\n"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "one"
    stored_run.make_step(place, SURROGATES["cppo"](), prompts=1, samples=2, tokens=4)
    return place


@contextmanager
def web(name: str, folder: Path) -> Iterator[tuple[Stranger, Callable[[], bool]]]:
    server, path, _, _ = SERVERS[name]
    with server(folder) as port:
        yield Stranger(port, path, KEYS[name]), lambda: sent(port, name) == 200


@contextmanager
def rank_watch(name: str, folder: Path) -> Iterator[tuple[Stranger, Callable[[], bool]]]:
    with met(2) as (watch, (rank,)):
        rank.connection.settimeout(600)

        def answers() -> bool:
            rank.send(beat=IDLE)
            return rank.receive() == [{"beat": True}] and watch.failure is None

        yield Stranger(watch.port), answers


PORTS: dict[str, Any] = {**dict.fromkeys(SERVERS, web), "ranks": rank_watch}


def rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.parametrize("name", PORTS)
def test_strangers_end_nothing_and_keep_nobody_out(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """All kinds in an order that a seed decides, each beside a client that is served; what they leave is bounded."""
    kinds = OF_ANY_PORT if name == "ranks" else [*KINDS]
    rng = random.Random(74)
    with caplog.at_level(logging.WARNING), PORTS[name](name, folder) as (stranger, answers):
        assert answers()
        threads, memory, files = threading.active_count(), rss_mib(), descriptors(os.getpid())
        stranger.rng = rng
        for kind in rng.sample(kinds, len(kinds)):
            with visited(kind, stranger):
                assert answers(), kind
            assert answers(), kind
        eventually(lambda: descriptors(os.getpid()) <= files + 1, "descriptors are left")
        assert rss_mib() < memory + HELD_MIB
        assert threading.active_count() <= threads + (name == "view")  # its reader
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert "Traceback" not in capfd.readouterr().err
