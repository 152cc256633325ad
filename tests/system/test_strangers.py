"""Every port that is opened, and what strangers send there."""

import logging
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from proxima.core import SURROGATES
from tests.processes import eventually
from tests.runtime.placement.test_rank_watch import IDLE, met
from tests.strangers import KINDS, OF_ANY_PORT, Stranger, descriptors, peak_mib, visited
from tests.system.test_web_requests import SERVERS, sent
from tests.view.microscope import stored_run

FILES = 256  # that a process of the campaign may have open
HELD_MIB = 100.0  # at most, more than before
PEAK_MIB = 256.0  # the same of a peak, while 500 strangers send 64 MiB each
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


@pytest.mark.slow
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


@contextmanager
def process(*words: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that may have few files open; it ends with its input."""
    command = ["bash", "-c", f'ulimit -n {FILES}; exec "$0" "$@"', sys.executable, "-m", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def is_served(port: int, path: str, headers: str) -> bool:
    """True once a request is answered 200: those who have come before may have to be closed first."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n".encode())
        return client.recv(65536).startswith(b"HTTP/1.1 200 ")
    return False


KEY = "tml-0123456789"
# by name: the words of the process, what a good client gets, what hostile ones post to, and their headers
OPENED: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    "ranks": (("tests.system.opened_port", "ranks", "FOLDER"), "", "/", ""),
    "agents": (("tests.system.opened_port", "agents", "FOLDER"), "", "/v1/chat/completions", KEYS["agents"]),
    "scorer": (("tests.system.opened_port", "scorer", "FOLDER"), "", "/score", ""),
    "view": (("proxima.cli.main", "view", "FOLDER", "--port", "0", "--no-browser"), "/api/runs", "/api/0/notes", ""),
    "training": (
        ("proxima.cli.main", "serve-training", "MODEL", "--folder", "SERVED", "--port", "0"),
        "/api/v1/healthz",
        "/api/v1/forward_backward",
        "",
    ),
}


@pytest.mark.campaign("tests/system/test_strangers.py::test_strangers_end_nothing_and_keep_nobody_out")
@pytest.mark.parametrize("name", OPENED)
@pytest.mark.parametrize("seed", range(2))
def test_a_process_with_few_files_survives_many_strangers(
    name: str, seed: int, folder: Path, tmp_path: Path, tiny_model: Any
) -> None:
    """2,000 silent ones at a process of 256 files among them, and 64 MiB of what does not end."""
    words, good, path, headers = OPENED[name]
    places = {"FOLDER": str(folder), "MODEL": str(tiny_model("llama")), "SERVED": str(tmp_path / "served")}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    try:
        with process(*(places.get(word, word) for word in words)) as server:
            assert server.stdin is not None and server.stdout is not None and server.stderr is not None
            port = int(re.findall(r":(\d+)", server.stdout.readline())[-1])

            def answers() -> bool:
                if good:
                    return is_served(port, good, headers)
                server.stdin.write("\n")
                server.stdin.flush()
                return server.stdout.readline() == "True\n"

            eventually(answers)
            before = peak_mib(server.pid)
            rng = random.Random(seed)
            kinds = OF_ANY_PORT if name == "ranks" else [*KINDS]
            for kind in rng.sample(kinds, len(kinds)):
                with visited(kind, Stranger(port, path, headers, size=1 << 26, number=500, rng=rng)):
                    eventually(answers, kind)
                    assert descriptors(server.pid) < FILES, kind
                assert server.poll() is None, kind
            assert peak_mib(server.pid) < before + PEAK_MIB
            server.send_signal(signal.SIGTERM) if good else server.stdin.close()
            assert server.wait(600) == 0
            assert "Traceback" not in server.stderr.read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
