"""Rank 0 hears the others over sockets; here, this test is the others."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxima.config.sections.placement import STARTED_BY
from proxima.data import UserError
from proxima.runtime.placement import rank_messages, rank_watch
from proxima.runtime.placement.rank_messages import (
    Channel,
    FoldedLines,
    ForwardedLines,
    RankFailure,
    follows_from_loss,
    span_of,
)
from proxima.runtime.placement.rank_watch import RankWatch, last_line
from proxima.view.log_lines import closing_line
from tests.processes import eventually

IDLE = {"call": "", "part": "", "collective": "", "waits": False, "issued": 4, "still": 0.0}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine no rank is silent unless a test says so."""
    monkeypatch.setattr(rank_messages, "SILENT_SECONDS", 300.0)


@contextmanager
def watching(size: int, *, own: dict[str, Any] = IDLE, in_call: bool = False) -> Iterator[RankWatch]:
    """A watch whose thread has ended after the block, and with it all that it writes."""
    before = threading.enumerate()
    status = SimpleNamespace(beat=lambda: dict(own), call=own["call"], part=own["part"])
    ranks: Any = SimpleNamespace(size=size, in_call=in_call, status=status)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_watch, "TICK", 0.01)
        watch = RankWatch(ranks, 600.0)
        (thread,) = (each for each in threading.enumerate() if each not in before)
        try:
            yield watch
        finally:
            watch.take()  # the watch would end this process
            watch.close()
            thread.join()


@contextmanager
def met(size: int, **options: Any) -> Iterator[tuple[RankWatch, list[Channel]]]:
    """A watch that has met all other ranks, and the ends of these."""
    with watching(size, **options) as watch:
        channels = [call(watch, rank) for rank in range(1, size)]
        watch.meet(600)
        yield watch, channels


def call(watch: RankWatch, rank: Any, *, token: str = "", **changed: Any) -> Channel:
    channel = Channel(socket.create_connection(("127.0.0.1", watch.port)))
    channel.connection.sendall((token or watch.token).encode())
    channel.send(**{"hello": rank, "host": "node", "facts": {}} | changed)
    return channel


def is_hung_up(channel: Channel) -> bool:
    channel.connection.settimeout(600)
    try:
        return channel.connection.recv(1) == b""
    except ConnectionError:  # it had sent more than was read
        return True


def failure_of(error: BaseException) -> dict[str, Any]:
    return asdict(RankFailure.of(error))


def failure(watch: RankWatch) -> RankFailure:
    eventually(lambda: watch.failure)
    assert watch.failure is not None
    return watch.failure


def test_the_missing_ranks_are_named_and_a_stranger_is_none() -> None:
    with watching(5) as watch:
        strangers = [call(watch, 3, token="guessed" * 5)]
        known = call(watch, 2)
        eventually(lambda: 2 in watch.peers)
        wrong = (2, 0, 5, -1, True, 3.0, "3", None, [1], {"x": [1]})  # the first is connected already
        strangers += [call(watch, rank) for rank in wrong]
        strangers += [call(watch, 3, host=["node"]), call(watch, 3, facts=[])]
        assert all(is_hung_up(stranger) for stranger in strangers)
        assert [*watch.peers] == [2]
        with pytest.raises(UserError, match=r"^ranks 1, 3-4 of 5 did not call port .* start all ranks again$"):
            watch.meet(0.01)
        known.connection.close()


@pytest.mark.slow
def test_a_rank_that_dies_is_the_cause_and_not_what_follows_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "SETTLE", 600.0)
    own = IDLE | {"call": "update of policy", "part": "micro-batch 2 of 3"}
    with met(3, own=own, in_call=True) as (watch, (first, second)):
        lost = RuntimeError("[…/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:52")
        first.send(error=failure_of(lost))
        eventually(lambda: watch.losing)
        second.connection.close()
        assert failure(watch).text.startswith("rank 2 on node died during update of policy, micro-batch 2 of 3: ")
        assert watch.cause(lost) is watch.failure


@pytest.mark.slow
def test_what_a_supervisor_starts_again_is_not_to_be_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    hint = "rank 1 on node died: it was killed, possibly out of memory (see dmesg there), or its node is gone"
    for variable, follows in (("", "resume with --resume"), ("ray", "all ranks restart, if placement.restarts allows")):
        if variable:
            monkeypatch.setenv(STARTED_BY, variable)
        with met(2) as (watch, (channel,)):
            channel.connection.close()
            assert last_line(failure(watch)) == f"{hint}; {follows}"
            ending = {"status": "failed", "steps": 1, "seconds": 3.0, "error": failure(watch).text}
            assert ("resume: " in closing_line(ending, None)) == (not variable)


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_what_follows_from_an_error_of_rank_0_is_not_printed(
    own: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_watch, "SETTLE", 0.0)
    with met(2) as (watch, (channel,)):
        if own:
            watch.take()
        channel.send(error=failure_of(RuntimeError("Connection was likely closed")))
        assert "likely closed" in failure(watch).text
    assert ("likely closed" in capfd.readouterr().err) == (not own)


@pytest.mark.slow
def test_a_rank_that_says_good_bye_has_not_died() -> None:
    with met(2) as (watch, (channel,)):
        channel.send(bye=True)
        channel.connection.close()
        eventually(lambda: len(watch._selector.get_map()) == 1)  # it has read the end
        assert watch.cause(ValueError("of rank 0's own")) is None
    assert watch.failure is None


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("refused", [True, False])
def test_a_rank_0_that_hangs_is_ended(
    refused: bool, in_order: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Soon, if the run has ended in order and only the process has not."""
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    missing = UserError("data.jsonl: no such file", remedy="copy it")  # what a node lacks
    line = "MemoryError: out of memory: 3 GiB; its traceback is in log.txt; resume with --resume"
    with met(2) as (watch, (channel,)):
        channel.send(error=failure_of(missing if refused else MemoryError("out of memory:\n 3 GiB")))
        assert failure(watch).refused == refused
        assert (
            last_line(failure(watch)) == f"rank 1 on node: {'data.jsonl: no such file; copy it' if refused else line}"
        )
        if in_order:
            with watch.attached(tmp_path / "log.txt", lambda text: None, lambda: None):
                pass
        watch._judge(time.monotonic())
        assert codes == []
        watch._judge(time.monotonic() + (2 * rank_watch.SETTLE if in_order else rank_watch.CLOSING) + 1)
        assert codes == [2 if refused else 1]
    assert capsys.readouterr().err.count("error: rank 1 on node: ") == 1


UNREADABLE = {
    "deep": b"[" * 200_000 + b"\n",
    "no object": b"[]\n",
    "no JSON": b"\xff\x00\n",
    "many digits": b'{"beat": ' + b"9" * 5000 + b"}\n",
    "a beat that is none": b'{"beat": 3}\n',
    "a beat without its parts": b'{"beat": {}}\n',
    "a beat of wrong parts": b'{"beat": %s}\n' % json.dumps(IDLE | {"issued": "4"}).encode(),
    "lines that are none": b'{"lines": 3}\n',
    "an error that is none": b'{"error": {"text": 3, "trace": 4}}\n',
    "an error of other parts": b'{"error": {"x": 3}}\n',
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_rank_that_sends_what_is_no_message_is_gone(name: str) -> None:
    with met(2) as (watch, (channel,)):
        channel.connection.sendall(UNREADABLE[name])
        assert failure(watch).text.startswith("rank 1 on node died: ")
        assert is_hung_up(channel)


@pytest.mark.slow
def test_a_message_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_messages, "MOST_MESSAGE", 1 << 20)
    with met(3) as (watch, (first, second)):
        line = "x" * ((1 << 20) - 100)
        first.send(lines=[line])
        eventually(lambda: line in watch.lines._waiting)
        with suppress(ConnectionError):
            second.connection.sendall(b" " * (1 << 21))
        assert failure(watch).text.startswith("rank 2 on node died: ")


def test_long_lines_and_traces_of_a_rank_are_cut_before_they_are_sent() -> None:
    sent = list[list[str]]()
    lifeline: Any = SimpleNamespace(channel=SimpleNamespace(send=lambda lines: sent.append(lines)))
    ForwardedLines(lifeline).write("a\n" + "b" * 20_000 + "\n \n" + "c\n" * 300)
    assert sent == [["a", "b" * 16_384 + "…", *["c"] * 254], ["c"] * 46]
    assert len(RankFailure.of(ValueError("x" * 500_000)).trace) == 262_144


@pytest.mark.slow
def test_equal_lines_of_ranks_are_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, added, add = tmp_path / "log.txt", list[str](), FoldedLines.add
    monkeypatch.setattr(FoldedLines, "add", lambda lines, rank, line: (add(lines, rank, line), added.append(line)))
    monkeypatch.setattr(rank_messages, "FOLD_SECONDS", 600.0)
    with met(4) as (watch, channels), watch.attached(log, print, lambda: None):
        for channel in channels:
            channel.send(lines=["a warning"])
        channels[1].send(lines=["of one rank", "of one rank"])
        eventually(lambda: len(added) == 5)
        watch.lines.flush()
        assert not log.exists()  # another rank may say it too
        monkeypatch.setattr(rank_messages, "FOLD_SECONDS", 0.0)
        eventually(log.exists)
    assert sorted(log.read_text().splitlines()) == ["[rank 2] of one rank", "[ranks 1-3] a warning"]


def test_lines_wait_until_they_can_be_written() -> None:
    lines, written = FoldedLines(), list[str]()
    lines.add(1, "early")
    lines.flush(at_once=True)
    lines.write = written.append
    lines.flush()
    assert written == []
    lines.flush(at_once=True)
    lines.flush(at_once=True)
    assert written == ["[rank 1] early"]


@pytest.mark.slow
def test_a_silent_rank_is_named_and_then_given_up() -> None:
    """It is told what time it is: in reality, no beat is late here."""
    warnings, cancelled = list[str](), list[int]()
    log = Path("/nowhere/log.txt")
    with met(3) as (watch, (silent, lively)), watch.attached(log, warnings.append, lambda: cancelled.append(1)):
        silent.send(beat=IDLE | {"call": "update of policy", "collective": "gather"})
        lively.send(beat=IDLE)
        assert silent.receive() == [{"beat": True}]  # rank 0 lives
        eventually(lambda: all(peer.beat is not None for peer in watch.peers.values()))
        since = watch.peers[1].heard
        watch.peers[2].heard = since + 400
        for seconds in (199, 201, 401):
            watch._check_progress(since + seconds)
        (warning,) = warnings
        assert warning.startswith("rank 1 on node has not responded for 201 s; it was last in update of")
        assert "after gather (collective 4)" in warning and watch.failure is None
        watch._check_progress(since + 601)
        assert "longer than placement.timeout=600; if it is only slow, raise placement.timeout" in failure(watch).text
        eventually(lambda: cancelled)


FIRST_BEHIND = "rank 0 on .* made no progress for 40 s in gather of policy; the others wait in no"
BEATS = [  # collectives that rank 1 has issued, seconds without progress, in a call; what is said when rank 0 issued 4
    (3, 50.0, True, "rank 1 on node made no progress .* in update of policy;"),
    (5, 50.0, True, FIRST_BEHIND),
    (3, 5.0, True, None),  # it moves
    (4, 50.0, True, None),  # all do the same
    (3, 900.0, False, None),  # it waits for generation
]


@pytest.mark.slow
@pytest.mark.parametrize(("issued", "still", "in_call", "sentence"), BEATS)
def test_the_rank_that_differs(
    issued: int, still: float, in_call: bool, sentence: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_messages, "SILENT_SECONDS", 30.0)
    own = IDLE | {"call": "gather of policy", "still": 40.0}
    with met(2, own=own, in_call=in_call) as (watch, (channel,)):
        channel.send(beat=IDLE | {"issued": issued, "still": still, "call": "update of policy" * (issued < 4)})
        eventually(lambda: watch.peers[1].beat is not None)
        late = watch.late(watch.peers[1].heard)
    assert late is None if sentence is None else late is not None and re.match(sentence, late[1])


def test_names_of_ranks() -> None:
    assert (span_of([2]), span_of([3, 1, 2, 6])) == ("rank 2", "ranks 1-3, 6")


def test_only_a_lost_connection_follows_from_a_loss() -> None:
    assert follows_from_loss(RuntimeError("NCCL error: remote process exited"))
    assert not follows_from_loss(RuntimeError("CUDA error: device-side assert triggered"))
    assert not follows_from_loss(ValueError("Connection closed by peer"))
