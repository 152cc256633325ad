"""Rank 0 hears the others over sockets; here, this test is the others."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from proxima.config.sections.placement_section import STARTED_BY
from proxima.data import UserError
from proxima.runtime.placement.rank_messages import Channel, follows_from_loss, span_of, told_error
from proxima.runtime.placement.rank_watch import RankFailure, RankWatch, last_line
from proxima.view.log_lines import closing_line

IDLE = {"call": "", "part": "", "collective": "", "waits": False, "issued": 4, "still": 0.0}


@contextmanager
def watching(
    size: int, *, own: dict[str, Any] = IDLE, in_call: bool = False, heartbeat: float = 0.0, timeout: float = 60.0
) -> Iterator[RankWatch]:
    watch = RankWatch(size, lambda: own, lambda: in_call, heartbeat, timeout)
    try:
        yield watch
    finally:
        watch.take()  # the watch would end this process
        watch.close()


def call(watch: RankWatch, rank: int, **changed: Any) -> Channel:
    channel = Channel(socket.create_connection(("127.0.0.1", watch.port), timeout=5))
    hello = {"hello": rank, "token": watch.token, "host": "node", "pid": 1, "facts": {"n": rank}}
    channel.send(**hello | changed)
    return channel


def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def failure(watch: RankWatch) -> RankFailure:
    until(lambda: watch.failure)
    assert watch.failure is not None
    return watch.failure


def test_all_ranks_meet() -> None:
    with watching(3) as watch:
        channels = [call(watch, rank) for rank in (2, 1)]
        peers = watch.meet(10)
        assert {rank: (peer.name, peer.facts["n"]) for rank, peer in peers.items()} == {
            1: ("rank 1 on node", 1),
            2: ("rank 2 on node", 2),
        }
        assert len(channels) == 2


def test_the_missing_ranks_are_named_and_a_stranger_is_none() -> None:
    with watching(5) as watch:
        channels = [call(watch, 2), call(watch, 3, token="guessed"), call(watch, 4, hello={"x": [1]}, token=0)]
        with pytest.raises(UserError, match=r"^ranks 1, 3-4 of 5 did not call port .* start all ranks again$"):
            watch.meet(0.5)
        assert channels[1].receive() is None  # it was hung up on


def test_a_rank_that_dies_is_the_cause_and_not_what_follows_from_it() -> None:
    with watching(3, own=IDLE | {"call": "update of policy", "part": "micro-batch 2 of 3"}, in_call=True) as watch:
        first, second = call(watch, 1), call(watch, 2)
        watch.meet(10)
        lost = RuntimeError("[…/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:52")
        first.send(error=told_error(lost), at=IDLE)
        until(lambda: watch.losing)
        second.connection.close()
        assert failure(watch).text.startswith("rank 2 on node died during update of policy, micro-batch 2 of 3: ")
        assert watch.cause(lost) is watch.failure


def test_what_a_supervisor_starts_again_is_not_to_be_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    hint = "rank 1 on node died: it was killed, possibly out of memory (see dmesg there), or its node is gone"
    for variable, follows in (("", "resume with --resume"), ("ray", "all ranks restart, if placement.restarts allows")):
        if variable:
            monkeypatch.setenv(STARTED_BY, variable)
        with watching(2) as watch:
            channel = call(watch, 1)
            watch.meet(10)
            channel.connection.close()
            assert last_line(failure(watch)) == f"{hint}; {follows}"
            ending = {"status": "failed", "steps": 1, "seconds": 3.0, "error": failure(watch).text}
            assert ("resume: " in closing_line(ending, None)) == (not variable)


def test_what_follows_from_an_error_of_rank_0_is_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    for own in (False, True):
        with watching(2) as watch:
            channel = call(watch, 1)
            watch.meet(10)
            if own:
                watch.own_error()
            channel.send(error=told_error(RuntimeError("Connection was likely closed")), at=IDLE)
            assert "likely closed" in failure(watch).text
            time.sleep(0.2)  # it is printed just after
        assert ("likely closed" in capfd.readouterr().err) == (not own)


def test_a_rank_that_says_good_bye_has_not_died() -> None:
    with watching(2) as watch:
        channel = call(watch, 1)
        watch.meet(10)
        channel.send(bye=True)
        channel.connection.close()
        time.sleep(0.5)
        assert watch.failure is None
        assert watch.cause(ValueError("of rank 0's own")) is None


def test_an_error_of_a_rank_is_told_with_its_traceback_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cancelled: list[int] = []
    with watching(2) as watch, watch.attached(tmp_path / "log.txt", lambda text: None, lambda: cancelled.append(1)):
        channel = call(watch, 1)
        watch.meet(10)
        try:
            raise MemoryError("out of memory:\n 3 GiB")
        except MemoryError as error:
            channel.send(error=told_error(error), at=IDLE)
        line = "rank 1 on node: MemoryError: out of memory: 3 GiB; its traceback is in log.txt; resume with --resume"
        assert last_line(failure(watch)) == line
        until(lambda: cancelled)
    assert capsys.readouterr().err == f"error: {line}\n"
    assert '[rank 1]     raise MemoryError("out of memory' in (tmp_path / "log.txt").read_text()


def test_what_a_node_lacks_is_refused() -> None:
    with watching(2) as watch:
        channel = call(watch, 1)
        channel.send(error=told_error(UserError("data.jsonl: no such file", remedy="copy it")), at=IDLE)
        assert last_line(failure(watch)) == "rank 1 on node: data.jsonl: no such file; copy it"
        assert watch.failure is not None and watch.failure.refused


def test_equal_lines_of_ranks_are_folded(tmp_path: Path) -> None:
    with watching(4) as watch, watch.attached(tmp_path / "log.txt", print, lambda: None):
        channels = [call(watch, rank) for rank in (1, 2, 3)]
        watch.meet(10)
        for channel in channels:
            channel.send(lines=["a warning"])
        channels[1].send(lines=["of one rank", "of one rank"])
        log = tmp_path / "log.txt"
        until(log.exists)
        until(lambda: len(log.read_text().splitlines()) == 2)
        assert log.read_text().splitlines() == ["[ranks 1-3] a warning", "[rank 2] of one rank (× 2)"]


def test_a_silent_rank_is_named_and_then_given_up() -> None:
    warnings: list[str] = []
    with (
        watching(3, heartbeat=0.2, timeout=2.0) as watch,
        watch.attached(Path("/nowhere/log.txt"), warnings.append, lambda: None),
    ):
        silent, lively = call(watch, 1), call(watch, 2)
        watch.meet(10)
        silent.send(beat=IDLE | {"call": "update of policy", "collective": "gather"})
        while watch.failure is None:
            lively.send(beat=IDLE)
            time.sleep(0.1)
        assert warnings[0].startswith("rank 1 on node has not responded for 1 s; it was last in update of")
        assert "after gather (collective 4)" in warnings[0]
        assert "longer than placement.timeout=2; if it is only slow, raise placement.timeout" in watch.failure.text


def beats(watch: RankWatch, channel: Channel, **beat: Any) -> tuple[float, str] | None:
    channel.send(beat=IDLE | beat)
    until(lambda: watch.peers[1].beat is not None)
    return watch.late(time.monotonic())


@pytest.mark.parametrize(
    ("beat", "sentence"),
    [
        (
            {"issued": 3, "still": 50.0, "call": "update of policy"},
            r"^rank 1 on node made no progress .* in update of policy;",
        ),
        (
            {"issued": 5, "still": 50.0},
            r"^rank 0 on .* made no progress for 40 s in gather of policy; the others wait in no",
        ),
        ({"issued": 3, "still": 5.0}, None),  # it moves
        ({"issued": 4, "still": 50.0}, None),  # all do the same
    ],
)
def test_the_rank_that_differs(beat: dict[str, Any], sentence: str | None) -> None:
    own = IDLE | {"call": "gather of policy", "still": 40.0}
    with watching(2, own=own, in_call=True, heartbeat=10.0, timeout=600.0) as watch:
        channel = call(watch, 1)
        watch.meet(10)
        late = beats(watch, channel, **beat)
        if sentence is None:
            assert late is None
        else:
            import re

            assert late is not None
            assert re.search(sentence, late[1])


def test_a_rank_that_waits_for_generation_is_not_late() -> None:
    with watching(2, own=IDLE | {"still": 900.0}, heartbeat=10.0, timeout=600.0) as watch:
        channel = call(watch, 1)
        watch.meet(10)
        assert beats(watch, channel, issued=3, still=900.0) is None


def test_names_of_ranks() -> None:
    assert (span_of([2]), span_of([3, 1, 2, 6])) == ("rank 2", "ranks 1-3, 6")


def test_only_a_lost_connection_follows_from_a_loss() -> None:
    assert follows_from_loss(RuntimeError("NCCL error: remote process exited"))
    assert not follows_from_loss(RuntimeError("CUDA error: device-side assert triggered"))
    assert not follows_from_loss(ValueError("Connection closed by peer"))
