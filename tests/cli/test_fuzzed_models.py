"""Damaged model folders, drawn by seed: each is refused in one line, or used; none is a bug, or ends the process."""

import json
import random
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from proxima.cli.main import main
from tests.model.folders import TEMPLATES

FOLDERS = 120
FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja")
VALUES: tuple[Any, ...] = (
    None, True, "x", "", "\ud800", -1, 0, 1, 7, 10**9, 2**64, 10**400, -0.5, 1e308, float("nan"), [], {}, [[1, 2]], [3],
    ["x"], {"x": 1}, {"content": 3}, {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
    {"type": "Prepend", "prepend": "x" * 100_000}, {"rope_type": "longrope"},
)  # fmt: skip
MOST_FIELDS = 3


def places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside a JSON value; of long objects and lists the first few."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [path for key in keys[:40] for path in [(*above, key), *places(value[key], (*above, key))]]


def change(value: Any, draw: random.Random) -> None:
    *above, key = draw.choice(places(value))
    for step in above:
        value = value[step]
    if draw.random() < 0.15:
        del value[key]
    else:
        value[key] = deepcopy(draw.choice(VALUES))  # it may be changed in its turn


def damage(folder: Path, draw: random.Random) -> str:
    """Change a file of the folder; returns what was done."""
    file = folder / draw.choices(FILES, (5, 1, 2, 2, 2))[0]
    if file.suffix == ".jinja":
        template = draw.choice(sorted(TEMPLATES))
        file.write_text(TEMPLATES[template], encoding="utf-8", errors="surrogatepass")
        return f"{file.name}: {template}"
    if draw.random() < 0.1:
        whole = file.read_bytes()
        broken = (whole[: len(whole) // 2], b"", b"[" * 100_000, b"\xff\xfe" + whole, b"[]", b"null", b"9" * 10_000)
        file.write_bytes(draw.choice(broken))
        return f"{file.name}: {file.read_bytes()[:40]!r}"
    before = file.read_text(encoding="utf-8")
    value = json.loads(before)
    for _ in range(draw.randint(1, MOST_FIELDS)):
        change(value, draw)
    file.write_text(json.dumps(value), encoding="utf-8")
    return f"{file.name}: {[key for key in value if json.loads(before).get(key) != value[key]]}"


def outcome(argv: list[str], capsys: Any) -> tuple[int, str]:
    code = main(argv)
    return code, capsys.readouterr().err


def require_refused_or_used(folder: Path, done: str, capsys: Any) -> None:
    """By `explain`, and by `generate` whatever `explain` says."""
    explained = "explain", "quickstart", f"model.path={folder}"
    generated = "generate", str(folder), "Hello?", "--max-tokens", "2", "--dtype", "float32"
    for argv in (explained, generated):
        code, said = outcome(list(argv), capsys)
        assert code in (0, 2), f"{done}: {argv[0]} ends with {code}: {said}"
        assert "Traceback" not in said, f"{done}: {argv[0]}: {said}"
        assert code == 0 or "error: " in said or "=" in said, f"{done}: {argv[0]}: {said}"


def fuzz(numbers: range, source: Path, tmp_path: Path, capsys: Any) -> None:
    for number in numbers:
        folder = tmp_path / f"model {number}"
        shutil.copytree(source, folder)
        (folder / "chat_template.jinja").touch()
        done = damage(folder, random.Random(f"model folder {number}"))
        require_refused_or_used(folder, f"folder {number}, {done}", capsys)
        shutil.rmtree(folder)


def test_damaged_folders_are_refused_in_a_line(tiny_model, tmp_path, capsys):
    fuzz(range(6), tiny_model("llama"), tmp_path, capsys)


@pytest.mark.campaign("tests/cli/test_fuzzed_models.py::test_damaged_folders_are_refused_in_a_line")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_many_damaged_folders(kind, tiny_model, tmp_path, capsys):
    fuzz(range(6, FOLDERS), tiny_model(kind), tmp_path, capsys)
