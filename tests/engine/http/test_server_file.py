"""Servers that join and leave a run by the file that `engine.url` names."""

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from proxima.data import FieldError, UserError
from proxima.engine.http import server_file
from proxima.engine.http.dialect import ServerFacts
from proxima.engine.http.engine import HttpEngine
from proxima.engine.http.server_checks import check_servers_of
from proxima.engine.http.server_file import read_addresses
from proxima.engine.http.weights.transport import Receivers, choose_transport
from proxima.engine.local.local_engine import collect
from tests.engine.http.plain_servers import (
    RULES,
    SERVERS,
    Plain,
    PlainServer,
    PlainSync,
    begun,
    check,
    fakes,
    go_on,
    hold_scores,
    replicas,
    requests,
    update,
    versions,
)
from tests.engine.http.test_server_checks import NEEDS
from tests.processes import until


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_file, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr("proxima.engine.http.replica_state.LONGEST_WAIT", 0.1)


class Listed:
    """A file of servers, an engine over it, and its events."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.engine: Any = None

    def write(self, *servers: PlainServer) -> None:
        self.text("# servers\n\n" + "".join(f"{server.url}/  # one\n" for server in servers))

    def text(self, text: str) -> None:
        new = self.place.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self.place)

    @contextmanager
    def open(self, *servers: PlainServer, **settings: Any) -> Iterator[HttpEngine]:
        self.write(*servers)
        spec = Plain(url=str(self.place), health_seconds=0.02, **settings)
        self.engine = HttpEngine(spec, RULES, PlainSync(spec))  # type: ignore[arg-type]
        try:
            yield self.engine
        finally:
            self.engine.close()

    @property
    def events(self) -> list[str]:
        return list(self.engine._pool.events)

    def count(self, name: str) -> int:
        return int(self.engine._pool.counts[name])

    async def joined(self, times: int) -> None:
        await until(lambda: self.count("joined") == times)

    async def left(self, times: int) -> None:
        await until(lambda: self.count("left") == times)


@pytest.fixture
def listed(tmp_path: Path) -> Listed:
    return Listed(tmp_path / "servers.txt")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", r"url='.*servers.txt' names no server; write one address per line, http://HOST:PORT"),
        ("# none\n\n", "names no server"),
        ("http://127.0.0.1:1\nlocalhost:2\n", "has an invalid line, 2: 'localhost:2' must be http://HOST:PORT"),
        ("http://me:secret@127.0.0.1:1\n", "has an invalid line, 1: '…' must hold no password"),
        ("http://192.0.2.1:1\n", "has an invalid line, 1: 'http://192.0.2.1:1' is on another machine"),
        ("http://127.0.0.1:1\nhttp://127.0.0.1:1/ # again\n", "names a server twice: http://127.0.0.1:1; leave one"),
        (b"\xff\xfe", "is not a text in UTF-8"),
        ("http://127.0.0.1:1\n" * 60_000, "has more than 1 MiB"),
        (None, "is neither http://HOST:PORT nor a file that can be read: No such file or directory; correct it"),
    ],
)
def test_a_file_that_names_no_servers_is_one_line(content: str | bytes | None, line: str, listed: Listed) -> None:
    if content is not None:
        listed.place.write_bytes(content if isinstance(content, bytes) else content.encode())
    spec = Plain(url=str(listed.place))
    with pytest.raises(FieldError, match=line) as caught:
        check_servers_of(spec, NEEDS)
    assert caught.value.field == "url" and "\n" not in str(caught.value) and "secret" not in str(caught.value)


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match="is not a file"):
        read_addresses(str(tmp_path), None, allow_remote=False)


def test_an_address_without_its_scheme_is_not_taken_for_a_file() -> None:
    for url in ("localhost:8000", "127.0.0.1:80", "http:"):
        with pytest.raises(FieldError, match="must be http://HOST:PORT"):
            Plain(url=url)
    with pytest.raises(FieldError, match="token_env='NOT_SET_HERE' must name an environment variable"):
        Plain(url="servers.txt", token_env="NOT_SET_HERE")
    with pytest.raises(FieldError, match="must be http://HOST:PORT"):
        Plain(url=("servers.txt",))


def test_servers_from_anywhere_get_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T", "key")
    facts = [ServerFacts(server="", model="", transfers=("folder", "group"), device="cpu")]
    assert choose_transport(Receivers(facts, Plain(url="servers.txt"))) == ("folder", "the servers are on this machine")
    remote = Plain(url="servers.txt", allow_remote=True, token_env="T")
    assert choose_transport(Receivers(facts, remote)) == (
        "group",
        "the servers may be on other machines, and all of them can join a group",
    )


async def test_a_server_joins_with_the_newest_weights_and_leaves(listed: Listed) -> None:
    first, second = fakes(2)
    with listed.open(first) as engine:
        await engine.publish(update(1))
        listed.write(first, second)
        await listed.joined(1)
        assert f"engine: {second.url} has joined, with weights of version 1" in listed.events
        assert second.weights == 0.8 and replicas(engine) == [True, True]
        asked = requests(8, 2)
        check(asked, await collect(engine, asked), 1)
        assert first.requests and second.requests
        await engine.publish(update(2))
        assert first.weights == second.weights == 1.3
        listed.write(second)
        await listed.left(1)
        assert f"engine: {first.url} has left: {listed.place} does not list it any more" in listed.events
        before = len(first.requests)
        asked = requests(8, 2, first=8)
        check(asked, await collect(engine, asked), 2)
        health = await engine.health()
        assert len(first.requests) == before and health.detail["replicas"]["of"] == 1
        assert health.tokens == sum(replica.received for replica in engine._pool.known)


@pytest.mark.parametrize("invariant", [True, False])
async def test_what_runs_on_a_server_that_leaves_is_requested_elsewhere_once(listed: Listed, invariant: bool) -> None:
    servers = fakes(2, facts={"batch_invariant": invariant})
    with listed.open(*servers) as engine:
        asked = requests(6, 2)
        task = await begun(engine, servers, asked)
        assert servers[0].running
        listed.write(servers[1])
        await listed.left(1)
        go_on(servers)
        check(asked, await task)
        assert not servers[0].running and engine._pool.counts["completed"] == len(asked)


async def test_a_server_that_leaves_in_a_pause_is_resumed(listed: Listed) -> None:
    servers = fakes(2)
    with listed.open(*servers) as engine:
        await engine.publish(update(1))
        await engine.pause()
        assert servers[0].paused and servers[1].paused
        listed.write(servers[1])
        await until(lambda: not servers[0].paused)
        assert servers[1].paused


async def test_a_server_that_left_may_join_again(listed: Listed) -> None:
    servers = fakes(2)
    with listed.open(*servers) as engine:
        await engine.publish(update(1))
        for times in (1, 2):
            listed.write(servers[1])
            await listed.left(times)
            servers[0].restart()
            listed.write(*servers)
            await listed.joined(times)
            assert servers[0].weights == 0.8 and len(engine._pool.replicas) == 2


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"model": "another"}, "its model is another, and that of the others is formula"),
        ({"log_probs": "raw"}, "its log-prob mode is raw, and that of the others is processed"),
        ({"letters": "gfedcba"}, "it has another tokenizer"),
        ({"batch_invariant": False}, "its completions depend on the batch, and those of the others do not"),
    ],
)
async def test_a_server_that_differs_is_not_used(facts: dict[str, Any], reason: str, listed: Listed) -> None:
    (good,), (bad,) = fakes(), fakes(facts=facts)
    with listed.open(good) as engine:
        await engine.publish(update(1))
        listed.write(good, bad)
        line = f"engine: {bad.url} can't join yet: {reason}"
        await until(lambda: line in listed.events)
        calls = bad.calls["/facts"]
        await until(lambda: bad.calls["/facts"] > calls + 2)
        asked = requests(4, 2)
        check(asked, await collect(engine, asked), 1)
        assert listed.events.count(line) == 1 and not bad.requests and not bad.calls["/weights"]


async def test_one_that_computes_with_other_weights_never_serves(listed: Listed) -> None:
    good, bad = fakes(2)
    bad.ignores_weights = True
    with listed.open(good) as engine:
        await engine.publish(update(1))
        listed.write(good, bad)
        await until(lambda: any("can't join yet: engine: " in line for line in listed.events))
        asked = requests(4, 2)
        check(asked, await collect(engine, asked), 1)
        assert not bad.requests and replicas(engine) == [True, False]


async def test_one_that_joins_before_the_first_weights_does_not_end_the_run(
    listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = fakes(2)
    bad.ignores_weights, checked = True, list[str]()

    async def check_way(self: Any, given: Any, update: Any) -> None:
        checked.extend(replica.url for replica in given)

    monkeypatch.setattr(PlainSync, "check", check_way)
    with listed.open(good) as engine:
        listed.write(good, bad)
        await listed.joined(1)
        await engine.publish(update(1))
        assert replicas(engine) == [True, False] and checked == [good.url]


async def test_an_error_of_the_file_is_a_line_and_the_run_goes_on(listed: Listed) -> None:
    first, second = fakes(2)
    with listed.open(first) as engine:
        ends = "; until then the run goes on with the servers that it has"
        for text, problem in (
            ("", "names no server"),
            (f"{first.url}\nhttp:/x\n", "has an invalid line, 2: 'http:/x'"),
        ):
            listed.text(text)
            await until(lambda problem=problem: any(problem in line for line in listed.events))
            assert listed.events[-1].startswith("engine.url=") and listed.events[-1].endswith(ends)
        listed.place.unlink()
        await until(lambda: any("No such file" in line for line in listed.events))
        assert len(listed.events) == 3 and listed.count("left") == 0
        listed.write(first, second)
        await listed.joined(1)
        assert replicas(engine) == [True, True]


async def test_a_half_written_file_is_not_followed(listed: Listed, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editor cuts the file, and writes it a moment later."""
    servers, file = fakes(2), server_file.ServerFile(str(listed.place), None, False)
    listed.write(*servers)
    assert [address.url for address in await file.news() or ()] == [server.url for server in servers]
    monkeypatch.setattr(server_file, "SETTLE_SECONDS", 0.2)
    for text in ("", servers[0].url[:-1]):
        listed.text(text)
        news = asyncio.create_task(file.news())
        await asyncio.sleep(0.05)
        listed.write(*servers)
        assert await news is None and await file.news() is None


@pytest.mark.slow
async def test_thirty_joins_while_weights_change(listed: Listed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every completion comes once, from the weights that it says; no server is asked for one before it is proven."""
    draws, servers = random.Random(30), fakes(2, facts={"batch_invariant": False})
    with listed.open(*servers) as engine:
        await engine.publish(update(1, 0.8))
        proven = dict[str, int]()
        whole: Callable[..., Any] = PlainSync.push

        async def push(self: Any, replica: Any, push_round: Any = None) -> Any:
            before = len(SERVERS[replica.url].requests)
            report = await whole(self, replica, push_round)
            proven.setdefault(replica.url, before)
            return report

        monkeypatch.setattr(PlainSync, "push", push)
        weights = {1: 0.8}
        uid, version = 0, 1
        for joins in range(1, 31):
            (new,) = fakes(facts={"batch_invariant": False}, slow=0.001 * draws.random())
            leaving = draws.choice(servers) if len(servers) > 2 or draws.random() < 0.5 else None
            if draws.random() < 0.3:  # it is still starting
                new.die()
            asked = requests(6, 2, first=uid, seed=joins)
            uid += 6
            task = asyncio.create_task(collect(engine, asked))
            servers = [server for server in servers if server is not leaving] + [new]
            listed.write(*servers)
            await asyncio.sleep(0.02 * draws.random())
            version += 1
            weights[version] = 0.5 + 0.02 * version
            release = hold_scores(new, 1) if draws.random() < 0.3 else None
            publishing = asyncio.create_task(engine.publish(update(version, weights[version])))
            await asyncio.sleep(0.02 * draws.random())
            if new.life is None:
                new.come_back()
            if release is not None:
                release()
            await asyncio.wait_for(publishing, 60)
            await asyncio.wait_for(listed.joined(joins), 60)
            given = await asyncio.wait_for(task, 60)
            monkeypatch.setattr("tests.engine.http.plain_servers.WEIGHTS", weights)
            check(asked, given)
            assert proven[new.url] == 0 and new.weights == weights[version]
            if leaving is not None:
                assert leaving not in servers and not leaving.running
        left = listed.count("left")
        assert left > 10 and listed.count("joined") == 30 and versions(given) <= set(weights)
        assert engine._pool.counts["completed"] == uid * 2 and len(engine._pool.replicas) == 32 - left


async def test_joins_are_refused_to_servers_elsewhere_without_a_key(listed: Listed) -> None:
    (server,) = fakes()
    with listed.open(server):
        listed.text(f"{server.url}\nhttp://192.0.2.1:8000\n")
        await until(lambda: any("'http://192.0.2.1:8000' is on another machine" in line for line in listed.events))


def test_a_run_that_begins_reads_the_file_anew(listed: Listed) -> None:
    first, second = fakes(2)
    with listed.open(first):
        pass
    with listed.open(second) as engine:
        assert [replica.url for replica in engine._pool.replicas] == [second.url]
    listed.write()
    with pytest.raises(UserError, match="names no server"):
        listed.engine.__class__(listed.engine.spec, RULES, PlainSync(listed.engine.spec))
