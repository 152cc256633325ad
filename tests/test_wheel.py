"""The wheels: what is in them, and that they run where there is no checkout."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from contextlib import chdir
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("peers", "plan", "tinker")  # of the other distributions
PEERS, *_ = PACKAGES = [ROOT / "packages" / f"proxima-{name}" for name in NAMES]
COMMANDS = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from proxima.cli.main import main

results = []
for words in json.load(sys.stdin):
    if words[0] == "path":
        sys.path.append(words[1])
        continue
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    results.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling builds the wheel"),
]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Those of the distributions of this repository, by the hook that pip calls."""
    from hatchling.build import build_wheel

    place = tmp_path_factory.mktemp("dist")
    files = []
    for folder in (ROOT, *PACKAGES):
        with chdir(folder):
            files.append(place / build_wheel(str(place)))
    return files


def held_by(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def tracked(*folders):
    """The files that git tracks in them."""
    command = ["git", "ls-files", *folders]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.slow
def test_it_holds_every_file_of_the_package_and_the_recipes(wheels):
    paths = tracked("src/proxima", "recipes")
    wanted = {f"proxima/{path}" if path.startswith("recipes/") else path.removeprefix("src/") for path in paths}
    held = held_by(wheels[0])
    with zipfile.ZipFile(wheels[0]) as archive:
        metadata = archive.read(next(name for name in held if name.endswith("/METADATA"))).decode()
    assert wanted <= held
    suffixes = {Path(name).suffix or Path(name).name for name in wanted}
    assert {".py", ".css", ".js", ".j2", ".yaml", ".json", ".jsonl", ".typed"} <= suffixes
    assert {name.partition("/")[0].partition("-")[0] for name in held} == {"proxima", "proxima_rl"}
    assert "Provides-Extra: demo" in metadata


@pytest.mark.parametrize(("place", "name"), list(enumerate(NAMES, 1)))
def test_another_one_holds_every_file_of_its_package(wheels, place, name):
    source = f"packages/proxima-{name}/src/"
    held = held_by(wheels[place])
    assert {path.removeprefix(source) for path in tracked(source)} <= held
    assert {path.partition("/")[0].partition("-")[0] for path in held} == {f"proxima_{name}"}


@pytest.fixture(scope="module")
def places(wheels, tmp_path_factory):
    """All packages as pip unpacks them, and what is installed here without the distributions of this repository."""
    top = tmp_path_factory.mktemp("places")
    for name, wheel in zip(("site", *NAMES), wheels, strict=True):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(top / name)
    (top / "dependencies").mkdir()
    installed = [file for path in sys.path if path.endswith("site-packages") for file in Path(path).iterdir()]
    for file in installed:
        if "proxima" not in file.name and not (top / "dependencies" / file.name).is_symlink():
            (top / "dependencies" / file.name).symlink_to(file)
    return top


EXAMPLE, RECORDS = str(PEERS / "tests/examples/verl_dapo.yaml"), str(PEERS / "tests/golden/trl_kto.json")
SERVED = ["serve-training", "model", "--dtype", "float16"]
PLANNED = ["plan", "qwen3_4b_grpo", "--devices", "8xH100-80G", "engine.slots=40"]
SMALL = ["train.steps=2", "train.warmup_steps=0", "train.prompts_per_step=2", "eval.limit=4", "folder=run"]


@pytest.fixture(scope="module")
def used(places, tmp_path_factory, tiny_model):
    """An empty folder, and exit code, output and errors of commands there, in one process that has these places alone:
    those that need the other packages without them, then with them."""
    folder, path = (
        tmp_path_factory.mktemp("empty"),
        os.pathsep.join((str(places / "site"), str(places / "dependencies"))),
    )
    varied = "reward=[number, {kind: format, pattern: '[!-?]', weight: 0.1}]"  # no random answer is right
    train = ["train", "quickstart", *SMALL, varied, f"model.path={tiny_model('llama')}"]
    lines = [["list", "recipes"], train, ["init"], ["--help"], ["peers", "verify", RECORDS], PLANNED]
    lines += [SERVED, *(["path", str(places / name)] for name in NAMES)]
    lines += [["peers", "convert", EXAMPLE, "--out", "converted.yaml"], ["peers", "verify", RECORDS], PLANNED, SERVED]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", "-P", "-c", COMMANDS]  # without site: the path, and no more
    settings = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "check": False}
    done = subprocess.run(command, input=json.dumps(lines), **settings)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.campaign("tests/test_wheel.py::test_it_holds_every_file_of_the_package_and_the_recipes")
def test_it_trains_in_an_empty_folder_and_other_commands_need_their_wheels(used):
    """With this environment's dependencies."""
    folder, (recipes, trained, init, shown, *refused, _, _, _, _) = used
    assert recipes[0] == 0 and "\nquickstart " in recipes[1] and "\ncpu/dapo " in recipes[1], recipes
    assert trained[0] == 0 and "done: 2 steps" in trained[1] and (folder / "run" / "report.html").is_file(), trained
    assert "# quickstart:" in (folder / "run" / "config.yaml").read_text()
    assert init[0] == 0 and (folder / "recipe.yaml").is_file(), init
    others = {"peers": "proxima-peers", "plan": "proxima-plan", "serve-training": "proxima-tinker"}
    for (name, package), answer in zip(others.items(), refused, strict=True):
        assert answer == [2, "", f"error: proxima {name} needs the package {package}; pip install {package}\n"]
        assert f"\n    {name} " in shown[1]


@pytest.mark.campaign("tests/test_wheel.py::test_another_one_holds_every_file_of_its_package[1-peers]")
def test_other_commands_have_their_wheels(used):
    folder, (*_, converted, verified, planned, served) = used
    assert converted[:2] == [0, "wrote converted.yaml\n"] and (folder / "converted.yaml").is_file(), converted
    assert verified[0] == 0 and " matched " in verified[1], verified
    assert planned[0] == 0 and "memory   fits: " in planned[1], planned
    refused = "error: argument --dtype: invalid choice: 'float16'; did you mean 'bfloat16'?"
    assert served == [2, "", f"{refused}; see proxima serve-training --help\n"]
