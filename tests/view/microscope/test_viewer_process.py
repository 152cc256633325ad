"""The microscope in a process beside a run: it answers, and it ends with whoever began it."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from proxima.api.saved import SavedRun
from proxima.core import SURROGATES
from proxima.runtime.watch.observer import RunInfo
from proxima.view.microscope import viewer_process
from proxima.view.microscope.viewer_process import ViewerObserver, ViewerProcess
from tests.processes import is_running
from tests.view.microscope.stored_run import make_step


def asked(address, path):
    return json.loads(urllib.request.urlopen(f"{address}api/{path}", timeout=120).read())


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_gone(pid, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not is_running(pid):
            return True
        time.sleep(0.1)
    return False


def test_it_serves_explains_in_another_process_and_ends_when_it_is_told(tmp_path):
    make_step(tmp_path / "run", SURROGATES["cppo"](), prompts=1, samples=2, tokens=6)
    viewer = ViewerProcess(tmp_path / "run")
    address = viewer.address()
    assert asked(address, "0/step/1/completion/0.0.0/token/0")["reason"].startswith(("kept: ", "masked: "))
    maps = Path(f"/proc/{viewer.process.pid}/maps").read_text()
    assert "libtorch_cpu" not in maps  # the server stays small
    below = children(viewer.process.pid)
    assert any("libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text() for pid in below)
    viewer.end()
    assert all(map(is_gone, below))


def test_it_ends_with_a_parent_that_is_killed(tmp_path):
    make_step(tmp_path / "run", SURROGATES["cppo"](), prompts=1, samples=1, tokens=3)
    code = (
        "import sys, time; from pathlib import Path; from proxima.view.microscope.viewer_process import ViewerProcess\n"
        "v = ViewerProcess(Path(sys.argv[1])); v.address(); print(v.process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    viewer = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert is_gone(viewer)
    parent.stdout.close()


def test_a_run_prints_the_address_and_a_notebook_shows_it(tmp_path, monkeypatch):
    class Started:
        def __init__(self, folder):
            self.folder = folder

        def address(self):
            return "http://127.0.0.1:1/"

        def end(self):
            self.folder = None

    monkeypatch.setattr(viewer_process, "ViewerProcess", Started)
    stream = io.StringIO()
    observer = ViewerObserver(stream)
    observer.started(RunInfo(version="", algorithm="", model="", seed=1, folder=tmp_path, steps=1))
    end = time.monotonic() + 5
    while not stream.getvalue() and time.monotonic() < end:
        time.sleep(0.01)
    assert stream.getvalue() == "view  http://127.0.0.1:1/  until the run ends\n"
    viewer = observer.viewer
    observer.finished({})
    assert viewer.folder is None
    shown = SavedRun(tmp_path).view()
    assert getattr(shown, "src", shown) == "http://127.0.0.1:1/"


def test_without_the_server_it_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="view=true needs uvicorn and starlette"):
        ViewerObserver(None)
