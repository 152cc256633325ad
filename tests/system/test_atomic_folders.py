"""Folders that appear whole or not at all, and what kills leave of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from proxima.system.atomic_files import atomic_folder

SOURCE = str(Path(__file__).parents[2] / "src")
WRITER = """
import sys, time
from pathlib import Path
from proxima.system import atomic_files
with atomic_files.atomic_folder(Path(sys.argv[1])) as part:
    (part / "weights").write_text("half")
    print("writing", flush=True)
    sys.stdin.readline()
    if sys.argv[2] == "between":
        flush = atomic_files.flush_to_disk
        rename = Path.rename
        def stop(place, to):
            rename(place, to)
            if to.suffix == ".old":
                print("between", flush=True)
                time.sleep(1000)
        Path.rename = stop
"""


def writer(target, when="inside"):
    started = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(target), when],
        env={"PYTHONPATH": SOURCE},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None and started.stdout.readline() == "writing\n"
    return started


def write(target, text="whole"):
    with atomic_folder(target) as part:
        (part / "weights").write_text(text)


@pytest.mark.slow
def test_what_a_killed_process_leaves_is_removed_by_the_next(tmp_path):
    target = tmp_path / "model"
    killed, living = writer(target), writer(target)
    killed.kill()
    killed.communicate()
    (tmp_path / ".other.12345678.part").mkdir()  # of another folder
    assert len(list(tmp_path.glob(".model.*.part"))) == 2
    write(target)
    assert len(list(tmp_path.glob(".model.*.part"))) == 1  # the living process goes on
    living.communicate("\n")
    assert living.returncode == 0
    assert (target / "weights").read_text() == "half"
    assert sorted(os.listdir(tmp_path)) == [".other.12345678.part", "model"]


@pytest.mark.slow
def test_a_kill_between_two_renames(tmp_path):
    target = tmp_path / "model"
    write(target, "former")
    killed = writer(target, "between")
    assert killed.stdin is not None and killed.stdout is not None
    killed.stdin.write("\n")
    killed.stdin.flush()
    assert killed.stdout.readline() == "between\n"
    killed.kill()
    killed.communicate()
    (former,) = tmp_path.glob(".model.*.old")
    assert (former / "weights").read_text() == "former"
    assert not target.exists()
    with pytest.raises(ZeroDivisionError), atomic_folder(target):
        raise ZeroDivisionError
    assert former.exists()  # it is all that there is
    write(target)
    assert os.listdir(tmp_path) == ["model"]


def test_a_name_with_brackets(tmp_path):
    for name in ("model[1]", "*"):
        (tmp_path / f".{name}.12345678.part").mkdir()
        write(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["*", "model[1]"]
