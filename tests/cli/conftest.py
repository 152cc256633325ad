import importlib.metadata
import shutil
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from dataclasses import replace
from functools import cache
from io import StringIO
from itertools import islice
from pathlib import Path
from textwrap import dedent

import pytest

from proxima.cli.main import main

TINY = """\
model: {{path: {model}, compute_dtype: float32}}
task: {{kind: arithmetic, low: 1, high: 9, size: 20}}
reward: [number, {{kind: format, pattern: '[!-?]', weight: 0.1}}]
algorithm: cppo
engine: {{slots: 8, dtype: float32}}
sampling: {{max_tokens: 4}}
train: {{steps: 2, prompts_per_step: 2, completions_per_prompt: 2, optimizer: {{lr: 1e-4}}}}
eval: {{task: {{kind: arithmetic, low: 1, high: 9, size: 6, split: test}}}}
runtime: {{threads: 1}}
"""
OVERRIDES = ("checkpoint.every=1", "eval.limit=3", "eval.sampling={temperature: 0}")  # of the run that is shared


@pytest.fixture
def proxima(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`proxima("train", "r.yaml")` runs a command line in this process: exit code, standard output, standard error."""

    def run(*words: object) -> tuple[int, str, str]:
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:  # argparse, for --help and --version
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def done(proxima: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """`done("train", "r.yaml")` runs a command line that works; standard output."""

    def run(*words: object) -> str:
        code, out, err = proxima(*words)
        assert code == 0, err
        return out

    return run


@pytest.fixture
def refusal(proxima: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """`refusal("train", "r.yaml")` runs a command line that is refused and prints nothing else; its one line."""

    def run(*words: object) -> str:
        code, out, err = proxima(*words)
        assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, (out, err)
        return err.removesuffix("\n")

    return run


INSTALLED = cache(importlib.metadata.entry_points)


@pytest.fixture(autouse=True)
def quick_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's rates are not measured for half a second: products with one small one, copies not at all. And its
    packages are not read again for each command that another distribution brings."""
    from proxima.system.machine import gemm_rate
    from proxima_plan import devices

    monkeypatch.setattr(gemm_rate, "__defaults__", ("cpu", 64, 1e-4))
    monkeypatch.setattr(devices, "_copy_rate", lambda device: 1e10)
    monkeypatch.setattr(importlib.metadata, "entry_points", INSTALLED)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def stranger(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], object]:
    """`stranger("lab1", source)` puts one module into the current folder, which is not the repository."""
    monkeypatch.syspath_prepend(str(here))
    return lambda name, source: (here / f"{name}.py").write_text(dedent(source))


@pytest.fixture
def recipe(here: Path, tiny_model: Callable[..., Path]) -> Callable[..., str]:
    """`recipe()` writes a recipe for a tiny model; `recipe(more)` adds lines to it."""

    def write(more: str = "", name: str = "tiny.yaml") -> str:
        (here / name).write_text(TINY.format(model=tiny_model("llama")) + more, encoding="utf-8")
        return name

    return write


def printed(folder: Path, *words: str) -> str:
    """What a command line that works prints there, where no fixture of one test can be used."""
    out = StringIO()
    with chdir(folder), redirect_stdout(out):
        assert main(list(words)) == 0
    return out.getvalue()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> tuple[Path, str]:
    """A folder with a recipe and its finished run, read-only by agreement, and what its command printed."""
    top = tmp_path_factory.mktemp("trained")
    (top / "tiny.yaml").write_text(TINY.format(model=tiny_model("llama")), encoding="utf-8")
    return top, printed(top, "train", "tiny.yaml", "folder=run", *OVERRIDES)


@pytest.fixture
def run(trained: tuple[Path, str], here: Path) -> str:
    """A copy of that run and its recipe in the current folder; what its command printed."""
    shutil.copytree(trained[0], here, dirs_exist_ok=True)
    return trained[1]


@pytest.fixture
def warm_rehearsals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal needs a process of its own; that one need not import torch first."""
    from proxima_plan.rehearsal import rehearsal
    from tests.cli.warm_rehearsals import WarmExecutor

    monkeypatch.setattr(rehearsal, "ProcessPoolExecutor", WarmExecutor)


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """`proxima check` tries the first cases of each law: tests/core and tests/laws have them all."""
    from proxima.laws import law, spec_check
    from proxima.laws.law import check_law

    def checked(law: law.Law, spec: object) -> law.LawResult:
        return check_law(replace(law, cases=lambda: islice(law.cases(), 2)), spec)

    for module in (spec_check, law):
        monkeypatch.setattr(module, "check_law", checked)
