"""The microscope in a process beside a run: it answers, and it ends with whoever began it."""

import io
import json
import subprocess
import sys
import urllib.request
from types import SimpleNamespace

import pytest

from proxima.core import SURROGATES
from proxima.view.microscope import viewer_process
from proxima.view.microscope.viewer_process import ViewerObserver, ViewerProcess
from tests.processes import eventually, is_running
from tests.view.microscope.stored_run import make_step
from tests.view.synthetic import info


def asked(address, path):
    return json.loads(urllib.request.urlopen(f"{address}api/{path}", timeout=600).read())


PARENT = """
import sys
from pathlib import Path
from proxima.view.microscope.viewer_process import ViewerProcess
viewer = ViewerProcess(Path(sys.argv[1]))
print(viewer.address(), viewer.child.process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_it_explains_and_ends_with_a_parent_that_is_killed(tmp_path):
    make_step(tmp_path / "run", SURROGATES["cppo"](), prompts=1, samples=2, tokens=6)
    command = [sys.executable, "-c", PARENT, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        address, pid = parent.stdout.readline().split()
        assert asked(address, "0/step/1/completion/0.0.0/token/0")["reason"].startswith(("kept: ", "masked: "))
        parent.kill()
    eventually(lambda: not is_running(int(pid)))


@pytest.mark.slow
def test_it_ends_when_it_is_told(tmp_path, warm_processes):
    make_step(tmp_path, SURROGATES["cppo"](), prompts=1, samples=2, tokens=6)
    viewer = ViewerProcess(tmp_path)
    assert asked(viewer.address(), "0/state")["running"] and is_running(viewer.child.process.pid)
    viewer.end()
    assert not is_running(viewer.child.process.pid)


def test_a_run_prints_the_address_and_a_notebook_shows_it(tmp_path, monkeypatch):
    ended = []
    viewer = SimpleNamespace(address=lambda: "http://127.0.0.1:1/", end=lambda: ended.append(True))
    monkeypatch.setattr(viewer_process, "ViewerProcess", lambda folder: viewer)
    stream = io.StringIO()
    observer = ViewerObserver(stream)
    observer.started(info(tmp_path))
    eventually(lambda: stream.getvalue().endswith("\n"))
    assert stream.getvalue() == "view  http://127.0.0.1:1/  until the run ends\n"
    observer.finished({})
    assert ended


def test_without_the_server_it_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="view=true needs uvicorn and starlette"):
        ViewerObserver(None)


def test_a_run_loads_no_web_server():
    """starlette and uvicorn are of the extra `serve`; the viewer has a process of its own."""
    code = "import sys, proxima.cli.train_run; print(*{'starlette', 'uvicorn'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
