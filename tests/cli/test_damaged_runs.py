"""Whatever damages a file of a run, each command that reads it ends with an exit code and a line, and the viewer with
an answer."""

import random
import shutil
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from proxima.data import UserError
from proxima.view.microscope.app import MicroscopeApp
from proxima.view.microscope.server import open_runs
from tests.campaigns import campaign
from tests.cli.conftest import OVERRIDES
from tests.cli.damages import a_folder, a_loop, damages_of, deep, long_number, not_utf8, other_column, text_not_utf8

READERS = (
    ("check", "run/"),
    ("compare", "run", "good"),
    ("plot", "threshold", "run"),
    ("plot", "divergence", "run"),
    ("eval", "--compare", "run", "good"),
    ("export", "run", "out"),
    ("view", "run", "--export", "1"),
    ("explain", "run"),
    ("reward", "score", "run/evals/000000-before.parquet", "number"),
)
TRAIN = ("train", "tiny.yaml", *OVERRIDES, "--quiet")
RUNS = ((*TRAIN, "folder=run", "--resume"), (*TRAIN, "folder=run", "--resume", "train.steps=3"))
REPLAY = ("train", "tiny.yaml", "folder=replay", "rollouts=run", "--quiet")
OVERWRITE = (*TRAIN, "folder=run", "--overwrite", "train.steps=1")
STEP = "/api/0/step/1"
PAGES = (
    *("/api/runs", "/api/0/trend", "/api/0/state", "/api/0/held-out", "/api/0/timeline", "/api/0/notes", STEP),
    *(f"{STEP}/search?q=a", f"{STEP}/group/0", f"{STEP}/completion/0.0.0", f"{STEP}/completion/0.0.0/token/0"),
)


@pytest.fixture
def good(run, here, monkeypatch):
    """A run and a copy of it; a bug prints its traceback."""
    monkeypatch.setenv("PROXIMA_DEBUG", "1")
    shutil.copytree("run", "good")
    return Path("run")


def assert_read(proxima, words):
    """A command ends as commands do; its exit code."""
    code, _, err = proxima(*words)
    assert code in (0, 1, 2) and "Traceback" not in err and "internal error" not in err, (words, code, err)
    assert code != 2 or err.count("error: ") == err.count("\n") >= 1, (words, err)
    return code


def assert_viewed(run):
    try:
        client = TestClient(MicroscopeApp(open_runs([str(run)])).asgi, base_url="http://127.0.0.1:8123")
    except UserError:
        return
    for page in PAGES:
        answer = client.get(page)
        assert answer.status_code < 500, (page, answer.text)


def assert_all_read(proxima, run, file, *, trained):
    """Every command, the viewer, and, if the run is `trained` on, a resume, a replay and a run in its place."""
    for words in READERS:
        assert_read(proxima, words)
        shutil.rmtree("out", ignore_errors=True)
    assert_viewed(run)
    if trained:
        assert_read(proxima, REPLAY)
        for words in RUNS:
            shutil.copytree(run, "kept", symlinks=True)
            assert_read(proxima, words)
            shutil.rmtree(run)
            Path("kept").rename(run)
        assert assert_read(proxima, OVERWRITE) == 0


def files_of(run):
    """The files of a run but those that nothing reads; of a model, its weights."""
    unread = {".lock", "log.txt", "report.html"}
    files = [file for file in sorted(run.rglob("*")) if file.is_file() and file.name not in unread]
    return [file for file in files if file.parent.name != "model" or file.name == "model.safetensors"]


@pytest.mark.parametrize(
    "seed", [0, 1, *campaign(f"{__name__.replace('.', '/')}.py::test_any_damage[0]", range(2, 120))]
)
def test_any_damage(proxima, good, seed):
    draw = random.Random(seed)
    file = draw.choice(files_of(good))
    damage = draw.choice(damages_of(file))
    damage(file, draw)
    assert_all_read(proxima, good, file, trained=seed > 1)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("evals/000002-after.parquet", not_utf8),
        ("evals/000002-after.parquet", text_not_utf8),
        ("evals/000002-after.parquet", other_column),
        ("rollouts/000001.parquet", text_not_utf8),
        ("environment.json", deep),
        ("environment.json", a_folder),
        ("summary.json", long_number),
        ("run.sqlite", a_folder),
        ("run.sqlite", a_loop),
        ("metrics.jsonl", a_folder),
        ("metrics.jsonl", deep),
    ],
)
def test_the_readers_of_a_damaged_file(proxima, good, name, damage):
    damage(good / name, random.Random(0))
    assert_all_read(proxima, good, good / name, trained=False)
