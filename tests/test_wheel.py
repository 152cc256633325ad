"""The wheel: what is in it, and that it runs where there is no checkout."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling builds the wheel"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    place = tmp_path_factory.mktemp("dist")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(place)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", str(ROOT), *options], check=True, cwd=place)
    (file,) = place.glob("*.whl")
    return file


def test_it_holds_every_file_of_the_package_and_the_recipes(wheel):
    tracked = subprocess.run(
        ["git", "ls-files", "src/proxima", "recipes"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    wanted = {f"proxima/{path}" if path.startswith("recipes/") else path.removeprefix("src/") for path in tracked}
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        metadata = archive.read(next(name for name in held if name.endswith("/METADATA"))).decode()
    assert wanted <= held
    suffixes = {Path(name).suffix or Path(name).name for name in wanted}
    assert {".py", ".css", ".js", ".j2", ".yaml", ".json", ".jsonl", ".typed"} <= suffixes
    assert not [name for name in held if name.startswith(("tests", "docs", "scripts"))]
    assert "Provides-Extra: demo" in metadata


def test_it_trains_in_an_empty_folder(wheel, tmp_path, tiny_model):
    """The package as pip unpacks it, with this environment's dependencies."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    def proxima(*words):
        command = [sys.executable, "-P", "-m", "proxima.cli.main", *words]
        return subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)

    done = proxima("list", "recipes")
    assert done.returncode == 0 and "\nquickstart " in done.stdout and "\ncpu/dapo " in done.stdout, done.stderr
    small = ["train.steps=2", "train.warmup_steps=0", "train.prompts_per_step=2", "eval.limit=4", "folder=run"]
    done = proxima("train", "quickstart", *small, f"model.path={tiny_model('llama')}")
    assert done.returncode == 0, done.stderr
    assert "done: 2 steps" in done.stdout and (empty / "run" / "report.html").is_file()
    assert "# quickstart:" in (empty / "run" / "config.yaml").read_text()
    done = proxima("init")
    assert done.returncode == 0 and (empty / "recipe.yaml").is_file(), done.stderr
