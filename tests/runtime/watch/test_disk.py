"""A full disk: the run waits, says so, and goes on where it was; nothing is lost, doubled or half-written."""

import asyncio
import errno
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name

import pytest

from proxima.runtime.state.journal import Journal
from proxima.runtime.watch.clock import VirtualClock, run_virtually
from proxima.runtime.watch.disk import Disk, StoppedWaiting
from proxima.system.full_disk import as_disk_full, is_disk_full
from tests.runtime.interruptions import press
from tests.runtime.tiny_run import Watcher, assert_same, traces

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
WRITES = (  # all that a run writes, by where it is called from
    "proxima.runtime.state.store.write_rollouts",
    "proxima.runtime.state.store.write_evals",
    "proxima.runtime.state.store.write_checkpoint",
    "proxima.runtime.state.folder.RunFolder.append_metrics",
    "proxima.runtime.state.folder.RunFolder.write_config",
    "proxima.runtime.state.folder.RunFolder.write_environment",
    "proxima.runtime.state.folder.RunFolder.write_summary",
    "proxima.runtime.state.journal.Journal.__init__",
    "proxima.runtime.state.journal.Journal.set",
    "proxima.runtime.state.journal.Journal.enqueue",
    "proxima.runtime.state.journal.Journal.generating",
    "proxima.runtime.state.journal.Journal.scored",
    "proxima.runtime.state.journal.Journal.select",
    "proxima.runtime.state.journal.Journal.consume",
)


@pytest.fixture
def small(tmp_path):
    """A file system of 24 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", place], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def fill(place: Path) -> Path:
    """Leave no byte; the file to delete is returned."""
    filler = place / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    return filler


def failing(monkeypatch, target):
    """Every third call succeeds; the others raise, before they change anything. The list counts them."""
    calls, (place, _, name) = [0], target.rpartition(".")
    owner = resolve_name(place)
    inner = getattr(owner, name)

    def call(*arguments, **options):
        calls[0] += 1
        if calls[0] % 3:
            raise OSError(*FULL.args)
        return inner(*arguments, **options)

    monkeypatch.setattr(owner, name, call)
    return calls


@pytest.mark.slow
def test_a_write_that_finds_no_space_is_made_again(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("proxima.runtime.watch.disk.RETRY_SECONDS", 0.001)
    calls, watcher = {target: failing(monkeypatch, target) for target in WRITES}, Watcher()
    assert runs.go("plain", tmp_path / "run", observer=watcher).status == "done"
    monkeypatch.undo()
    assert_same(traces(tmp_path / "run"), runs.traces("plain"))
    assert all(count > 0 and count % 3 == 0 for (count,) in calls.values()), calls
    warnings = [text for text in watcher.warnings if "No space left" in text or "space is available again" in text]
    assert "MiB free): the run waits and retries" in warnings[0]
    assert warnings[-1].startswith("disk space is available")
    pauses = sum(count for (count,) in calls.values()) // 3
    assert len(warnings) <= 2 * pauses  # once a pause, not once an attempt


@pytest.mark.slow
def test_all_of_them_on_a_disk_that_is_really_full(runs, small, monkeypatch):
    """The disk is filled at every file of the run, and emptied by whoever reads the warning."""
    monkeypatch.setattr("proxima.runtime.watch.disk.RETRY_SECONDS", 0.001)
    filler, paused, waiting = small / "filler", [], []

    def on(event, *facts):
        if event == "warning" and "the run waits" in facts[0]:
            paused.append(facts[0])
            waiting.append(1)
            filler.unlink()
        elif event == "warning" and "space is available again" in facts[0]:
            waiting.clear()
        elif not waiting:
            fill(small)

    assert runs.go("plain", small / "run", observer=Watcher(on)).status == "done"
    filler.unlink(missing_ok=True)
    assert_same(traces(small / "run"), runs.traces("plain"))
    named = {Path(text.split(": ")[0]).name for text in paused}
    assert named >= {"run.sqlite", "000001.parquet", "000001", "000003-after.parquet"}, named
    assert not list((small / "run").rglob("*.part"))


@pytest.mark.slow
def test_ctrl_c_ends_a_run_that_waits(runs, tmp_path, monkeypatch):
    """In the middle of a step, and again while the last checkpoint is written; a resume finds what there was."""
    monkeypatch.setattr("proxima.runtime.state.journal.Journal.consume", full_at(2, Journal.consume))
    for _ in range(2):
        watcher = Watcher(lambda event, *facts: event == "warning" and "run waits" in facts[0] and press())
        summary = runs.go("plain", tmp_path / "run", observer=watcher, resume=True)
        assert (summary.status, summary.steps) == ("stopped", 1)
        end = "without another checkpoint; --resume continues from the checkpoint of step 1"
        assert watcher.warnings[-1].endswith(end)
    monkeypatch.undo()
    assert runs.go("plain", tmp_path / "run", resume=True).status == "done"
    assert_same(traces(tmp_path / "run"), runs.traces("plain"))


def full_at(step, consume):
    def call(journal, number, *arguments, **options):
        if number == step:
            raise OSError(*FULL.args)
        consume(journal, number, *arguments, **options)

    return call


def test_calls_are_made_in_order_and_as_often_as_needed(tmp_path):
    clock, done, warned, room = VirtualClock(), [], [], []

    def call(name):
        if not room:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "metrics.jsonl")
        done.append(name)
        return name

    async def scenario():
        disk = Disk(tmp_path, warned.append)
        disk.enqueue(call, "a")
        asyncio.get_running_loop().call_later(12, room.append, True)
        asyncio.get_running_loop().call_later(7, disk.enqueue, call, "c")
        assert await disk.write(call, "b") == "b" and clock.now() == 15.0
        assert clock.wall() == "2026-01-01T00:00:15.000+00:00"
        assert await disk.write(call, "d") == "d" and clock.now() == 15.0
        room.clear()
        disk.stop.set()
        with pytest.raises(StoppedWaiting, match="metrics.jsonl: Disk quota exceeded"):
            await disk.write(call, "e")

    run_virtually(scenario(), clock)
    assert done == ["a", "b", "c", "d"]
    assert [text.split(" (")[0] for text in warned] == [
        "metrics.jsonl: Disk quota exceeded",
        "disk space is available again: the run continues",
        "metrics.jsonl: Disk quota exceeded",
    ]


def test_another_error_is_raised_and_does_not_come_again(tmp_path):
    async def scenario():
        disk = Disk(tmp_path, lambda text: None)
        with pytest.raises(OSError, match="Input/output"):
            await disk.write(raising, OSError(errno.EIO, os.strerror(errno.EIO)))
        with pytest.raises(ValueError, match="illegal"):
            disk.enqueue(raising, ValueError("illegal"))
        assert await disk.write(lambda: 1) == 1

    def raising(error):
        raise error

    asyncio.run(scenario())


def test_a_full_disk_is_recognised_whoever_reports_it(small):
    assert is_disk_full(OSError(errno.EDQUOT, "")) and not is_disk_full(OSError(errno.EIO, ""))
    raised = Exception("Error while serializing: I/O error: No space left on device (os error 28)")
    error = as_disk_full(raised, small / "x")
    assert error.errno == errno.ENOSPC and error.filename == str(small / "x")
    assert as_disk_full(RuntimeError("disk I/O error"), small / "x") is None
    filler = fill(small)
    assert as_disk_full(RuntimeError("disk I/O error"), small / "x").errno == errno.ENOSPC
    assert as_disk_full(KeyboardInterrupt(), small / "x") is None
    with pytest.raises(OSError, match="No space left"):
        Journal(small / "run.sqlite")
    filler.unlink()
    with Journal(small / "run.sqlite") as journal:
        assert journal.step == 0
