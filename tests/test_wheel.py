"""The wheel: what is in it, and that it runs where there is no checkout."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "packages" / "proxima-peers"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling builds the wheel"),
]


def built(folder, place):
    """The wheel of a distribution of this repository."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(place)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", str(folder), *options], check=True, cwd=place)
    (file,) = place.glob("*.whl")
    return file


def unpacked(wheel, place):
    """The package as pip unpacks it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    return place


def held_by(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def tracked(*folders):
    """The files that git tracks in them."""
    command = ["git", "ls-files", *folders]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def peers_wheel(tmp_path_factory):
    return built(PEERS, tmp_path_factory.mktemp("dist"))


def test_it_holds_every_file_of_the_package_and_the_recipes(wheel):
    paths = tracked("src/proxima", "recipes")
    wanted = {f"proxima/{path}" if path.startswith("recipes/") else path.removeprefix("src/") for path in paths}
    held = held_by(wheel)
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(name for name in held if name.endswith("/METADATA"))).decode()
    assert wanted <= held
    suffixes = {Path(name).suffix or Path(name).name for name in wanted}
    assert {".py", ".css", ".js", ".j2", ".yaml", ".json", ".jsonl", ".typed"} <= suffixes
    assert {name.partition("/")[0].partition("-")[0] for name in held} == {"proxima", "proxima_rl"}
    assert "Provides-Extra: demo" in metadata


def test_that_of_the_peers_holds_every_file_of_its_package(peers_wheel):
    source = "packages/proxima-peers/src/"
    held = held_by(peers_wheel)
    assert {path.removeprefix(source) for path in tracked(source)} <= held
    assert {name.partition("/")[0].partition("-")[0] for name in held} == {"proxima_peers"}


def test_it_trains_in_an_empty_folder(wheel, tmp_path, tiny_model):
    """With this environment's dependencies."""
    site, empty = unpacked(wheel, tmp_path / "site"), tmp_path / "empty"
    empty.mkdir()
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


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory):
    """What is installed here, without the distributions of this repository."""
    place = tmp_path_factory.mktemp("dependencies")
    installed = [file for path in sys.path if path.endswith("site-packages") for file in Path(path).iterdir()]
    for file in installed:
        if "proxima" not in file.name and not (place / file.name).is_symlink():
            (place / file.name).symlink_to(file)
    return place


def test_convert_and_verify_need_the_wheel_of_the_peers(wheel, peers_wheel, dependencies, tmp_path):
    site, peers = unpacked(wheel, tmp_path / "site"), unpacked(peers_wheel, tmp_path / "peers")
    example, records = PEERS / "tests" / "examples" / "verl_dapo.yaml", PEERS / "tests" / "golden" / "trl_kto.json"

    def proxima(*words, path):
        command = [sys.executable, "-S", "-P", "-m", "proxima.cli.main", *words]  # without site: the path, and no more
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    for name, file in (("convert", example), ("verify", records)):
        refused = proxima(name, str(file), path=[site, dependencies])
        line = f"error: proxima {name} needs the package proxima-peers; pip install proxima-peers\n"
        assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", line)
        assert f"\n    {name} " in proxima("--help", path=[site, dependencies]).stdout
    done = proxima("convert", str(example), "--out", "recipe.yaml", path=[site, peers, dependencies])
    assert (done.returncode, done.stdout) == (0, "wrote recipe.yaml\n"), done.stderr
    done = proxima("verify", str(records), path=[site, peers, dependencies])
    assert done.returncode == 0 and " matched " in done.stdout, done.stderr
