"""The fake of a server's program, and questions about processes."""

import json
import sys
import urllib.request
from pathlib import Path

from tests.processes import eventually

FAKE = Path(__file__).with_name("fake_vllm.py")
LONG = 600.0  # seconds after which something must have happened


def fake_program(folder):
    """The fake as an executable file below a folder."""
    path = folder / "bin" / "vllm"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    path.chmod(0o755)
    return str(path)


def ask(url, path, key=""):
    """What a server answers."""
    request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=LONG) as answer:
        return json.loads(answer.read())


def pids(path):
    """Of the fake and its child."""
    return [int(word) for word in eventually(lambda: path.exists() and path.read_text()).split()]
