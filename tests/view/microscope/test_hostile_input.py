"""Damaged folders, hostile names and requests, through the process of the command: each is one line, the next request
is answered, and the other runs are shown."""

import http.client
import json
import os
import random
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest

from proxima.core import SURROGATES
from tests.campaigns import campaign
from tests.view.microscope.stored_run import make_step
from tests.warm import WarmPopen

pytestmark = pytest.mark.slow

NAMED = b"two\nlines <b>\xff"  # a name that is no UTF-8


@contextmanager
def served(*runs):
    """`proxima view` in its own process: a function that asks it."""
    command = [sys.executable, "-m", "proxima.cli.main", "view", *map(os.fsdecode, runs), "--port", "0", "--no-browser"]
    with WarmPopen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().split()[0]
            yield asking(int(re.search(r":(\d+)/", address)[1]))
        finally:
            process.terminate()


def asking(port):
    def ask(path, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        content = answer.read().decode()
        connection.close()
        value = json.loads(content) if answer.getheader("content-type") == "application/json" else content
        if answer.status >= 400:
            assert "\n" not in value["error"] and "Traceback" not in value["error"], path
        return answer.status, value

    return ask


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """A server of a whole run, one whose files are damaged while it is open, one of an odd name, and one that goes."""
    place = tmp_path_factory.mktemp("runs")
    runs = [place / "whole", place / "damaged", os.fsencode(place) + b"/" + NAMED, place / "gone"]
    for run in runs:
        make_step(os.fsdecode(run), SURROGATES["cppo"](), prompts=4, samples=4, tokens=40)
    make_step(runs[1], SURROGATES["cppo"](), prompts=4, samples=4, tokens=40, step=2)
    with served(*runs) as ask:
        ask.folder = place
        yield ask


PATHS = (
    "",
    "/group/0",
    "/group/3",
    "/completion/0.0.0",
    "/completion/3.3.0",
    "/search?q=add",
    "/completion/1.1.0/token/0",
)


PARQUET = "tests/view/microscope/test_hostile_input.py::test_a_parquet_file_that_is_damaged_or_cut_while_it_is_open"


@pytest.mark.parametrize("trials", [12, *campaign(f"{PARQUET}[12]", [60])])
def test_a_parquet_file_that_is_damaged_or_cut_while_it_is_open(ask, trials):
    """Any bytes of it may change under the server: it answers or says what is wrong, and lives on."""
    file = ask.folder / "damaged" / "rollouts" / "000001.parquet"
    whole, draw, result = file.read_bytes(), random.Random(0), set()
    for trial in range(trials):
        content = bytearray(whole)
        if trial % 3 == 0:
            content = content[: draw.randrange(len(content))]  # as a writer that does not rename leaves it
        else:
            for _ in range(1 + trial // 6):
                content[draw.randrange(len(content))] = draw.randrange(256)
        file.write_bytes(content)
        os.utime(file, ns=(trial, trial))
        for path in draw.sample(PATHS, 3):
            result.add(ask(f"/api/1/step/1{path}")[0])
        assert ask("/api/runs")[0] == 200
    assert result >= {200, 404}
    file.write_bytes(whole)
    assert [ask(f"/api/1/step/1{path}")[0] for path in PATHS] == [200] * len(PATHS)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.jsonl", b'{"kind": "train"}\n'),
        ("metrics.jsonl", b'{"kind": "train", "step": "x"}\n{"kind": "eval", "step": []}\n'),
        ("metrics.jsonl", b'{"kind": "train", "step": 1, "a": "\\ud83d", "\\udc00": 1e999, "b": NaN}\n'),
        ("metrics.jsonl", b"[1]\n\xff\n"),
        ("config.yaml", b"algorithm: [1, 2]\nmodel: {path: [x]}\n"),
        ("config.yaml", b"model: {path: \"\\u0000/x\"}\n\xff"),
        ("config.yaml", b"a: &a [x,x]\nalgorithm: {surrogate: {kind: [*a]}, proximal: {}, correction: 7}\n"),
        ("summary.json", b'{"status": ["done"], "model": {"a": 1}, "algorithm": "\\ud83d"}'),
        ("timeline.json", b'[{"ph": "X"}, 3'),
    ],
)  # fmt: skip
def test_other_files_of_a_run_that_are_damaged(file, content, ask):
    damaged = ask.folder / "damaged" / file
    before = damaged.read_bytes() if damaged.exists() else None
    try:
        damaged.write_bytes(content)
        for path in (
            "trend",
            "state",
            "timeline",
            "step/2",
            "step/2/completion/0.0.0",
            "step/2/completion/0.0.0/token/1",
        ):
            status, _ = ask(f"/api/1/{path}")
            assert status == 200 or file != "summary.json", path
        status, runs = ask("/api/runs")
        assert status == 200 and runs[0]["problem"] is None, runs
    finally:
        damaged.unlink() if before is None else damaged.write_bytes(before)


def test_a_name_with_newlines_that_is_no_utf8(ask):
    name = ask("/api/runs")[1][2]["name"]
    assert name == "two\nlines <b>?"
    assert ask("/api/2/step/1/completion/0.0.0")[0] == 200
    assert ask("/api/2/notes")[1] == {}


def test_a_run_folder_that_is_removed_while_it_is_open(ask):
    assert ask("/api/3/step/1/completion/0.0.0/token/0")[0] == 200
    shutil.rmtree(ask.folder / "gone")
    runs = ask("/api/runs")[1]
    assert runs[0]["problem"] is None and runs[3]["problem"].startswith("the folder has no run, or is gone; ")
    for path in ("step/1", "step/1/group/0", "step/1/completion/0.0.0", "step/1/completion/0.0.0/token/0"):
        status, answer = ask(f"/api/3/{path}")
        assert status == 404 and "step 1 has no completions here" in answer["error"]
    assert ask("/api/3/state")[1] == {"step": 0, "running": True, "steps": []}
    assert ask("/api/3/trend")[0] == 200 and ask("/api/0/step/1")[0] == 200
