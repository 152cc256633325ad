"""Each field of docs/commands.md exists, and the value beside it is one that it takes."""

import re
import shlex

import pytest

from proxima.config.resolution import resolve
from tests.docs.printed import ROOT

TEXT = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (?!you want|---)(.+?) \| (.+) \|$", TEXT, re.MULTILINE)
ASSIGNMENT = re.compile(r"[a-z_.]+=")


def assignments():
    for wanted, cell in ROWS:
        for code in re.findall(r"`([^`]+)`", cell):
            words = shlex.split(code)
            if all(ASSIGNMENT.match(word) for word in words):
                yield pytest.param(words, id=f"{wanted[:40]}-{code[:60]}")


@pytest.mark.slow
@pytest.mark.parametrize("words", assignments())
def test_a_field_takes_its_value(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward.py").write_text("def near(completion: str, answer):\n    return 0.0\n")
    resolved = resolve("quickstart", words)
    for word in words:
        field = word.partition("=")[0]
        origins = {entry.origin for entry in resolved.entries if f"{field}.".startswith(f"{entry.path}.")}
        origins |= {entry.origin for entry in resolved.entries if f"{entry.path}.".startswith(f"{field}.")}
        assert origins & {"command line", "preset"} or word.endswith("={}"), field


def test_every_row_names_a_field_or_a_command():
    assert len(ROWS) >= 50
    for wanted, cell in ROWS:
        assert re.search(r"`[a-z_.]+=|`proxima |chat_template", cell), wanted
