"""Locks of files, also where a file system has none; files that another user has put where one is expected."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from proxima.engine.http.weights.weight_folders import LOCK_FILE, PREFIX, remove_leftovers
from proxima.system import locks
from proxima.system.linux import process_start
from proxima.system.locks import FileLock, is_held, open_regular

SOURCE = str(Path(__file__).parents[2] / "src")
# Holds the lock of a file, on a file system without locks, until it is killed.
HOLDER = """
import errno, fcntl, sys, time
def no_locks(*_): raise OSError(errno.EOPNOTSUPP, "no locks")
fcntl.flock = no_locks
from pathlib import Path
from proxima.system.locks import FileLock
held = FileLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(1000)
"""


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def without_locks(request, monkeypatch):
    def flock(*_):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "link", "device", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, kind, shared):
    path = tmp_path / ".lock"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        (tmp_path / "else").write_text("")
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "else")
    with pytest.raises(OSError, match="not a regular file|symbolic link|directory"):
        FileLock(path, shared=shared)
    assert not is_held(path)


def test_another_users_file_is_not_ones_own(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    open_regular(tmp_path / "file", "rb", own=True).close()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError):
        open_regular(tmp_path / "file", "rb", own=True)


@pytest.mark.usefixtures("without_locks")
def test_one_writer_where_there_are_no_locks(tmp_path):
    path = tmp_path / ".lock"
    first = FileLock(path)
    assert first.replaced
    assert is_held(path)
    for shared in (False, True):
        with pytest.raises(BlockingIOError):
            FileLock(path, shared=shared)
    first.release()
    assert not is_held(path)
    readers = [FileLock(path, shared=True) for _ in range(2)]
    FileLock(path).release()  # readers hold nothing there
    for reader in readers:
        reader.release()
    assert [entry.name for entry in tmp_path.iterdir()] == [".lock"]


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_a_killed_writer_leaves_no_lock_where_there_are_none(tmp_path, monkeypatch, shared):
    path = tmp_path / ".lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], env={"PYTHONPATH": SOURCE}, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"

    def flock(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert is_held(path)
    holder.kill()
    holder.communicate()
    FileLock(path, shared=shared).release()
    assert [entry.name for entry in tmp_path.iterdir()] == [".lock"]


@pytest.mark.usefixtures("without_locks")
@pytest.mark.parametrize(
    ("change", "held"),
    [
        ({}, True),
        ({"host": "another"}, True),  # it may live
        ({"boot": "before"}, False),
        ({"start": "1"}, False),  # a later process has its number
        ({"pid": 1 << 22}, False),
    ],
)
def test_whose_file_it_is(tmp_path, change, held):
    path = tmp_path / ".lock"
    first = FileLock(path)
    owner = tmp_path / ".lock.owner"
    owner.write_text(json.dumps(json.loads(owner.read_text()) | change))
    assert is_held(path) == held
    assert owner.exists() == held
    first.release()


@pytest.mark.usefixtures("without_locks")
def test_a_file_that_is_being_written_is_held(tmp_path):
    (tmp_path / ".lock.owner").write_text("")
    with pytest.raises(BlockingIOError):
        FileLock(tmp_path / ".lock")


@pytest.mark.usefixtures("without_locks")
def test_who_comes_second_after_a_killed_writer_is_refused(tmp_path, monkeypatch):
    """Two processes find the leftover of a third; one is faster, and the other must not remove its file."""
    path, owner = tmp_path / ".lock", tmp_path / ".lock.owner"
    FileLock(path)
    note = json.loads(owner.read_text())
    owner.write_text(json.dumps(note | {"boot": "before"}))
    set_aside, faster = locks._set_aside, []

    def slowly(place, found):
        monkeypatch.setattr(locks, "_set_aside", set_aside)
        faster.append(FileLock(path))
        set_aside(place, found)

    monkeypatch.setattr(locks, "_set_aside", slowly)
    with pytest.raises(BlockingIOError):
        FileLock(path)
    assert is_held(path)
    faster[0].release()
    assert not is_held(path)


@pytest.mark.usefixtures("without_locks")
def test_a_file_system_without_links_too(tmp_path, monkeypatch):
    def link(*_):
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", link)
    first = FileLock(tmp_path / ".lock")
    with pytest.raises(BlockingIOError):
        FileLock(tmp_path / ".lock")
    first.release()


def test_when_a_process_began():
    assert process_start(os.getpid()) == process_start(os.getpid()) is not None
    assert process_start(1 << 22) is None


@pytest.mark.parametrize("what", ["pipe", "zero", "linked folder", "another's"])
def test_what_others_put_among_the_leftovers_is_left_alone(tmp_path, monkeypatch, what):
    place = tmp_path / f"{PREFIX}of-somebody"
    kept = tmp_path / "kept"
    kept.mkdir()
    if what == "linked folder":
        place.symlink_to(kept)
        (kept / LOCK_FILE).write_text("")
    else:
        place.mkdir()
    if what == "pipe":
        os.mkfifo(place / LOCK_FILE)
    elif what == "zero":
        (place / LOCK_FILE).symlink_to("/dev/zero")
    elif what == "another's":
        (place / LOCK_FILE).write_text("")
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    for shared in (False, True):
        remove_leftovers(tmp_path, shared=shared)
    assert place.exists()
    assert kept.exists()
