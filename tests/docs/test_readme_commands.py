"""Each command of README.md can be typed: its files exist, another makes them, or capitals say what to fill in."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from proxima.cli.main import COMMANDS
from proxima.config import resolve
from proxima.data.recipe_files import find_recipe, shipped_recipes

ROOT = Path(__file__).resolve().parents[2]
LINES = re.findall(r"^    (proxima .*?)(?:  +.*)?$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
MADE = {"models/smollm2-135m-instruct", "runs/grpo_cppo"}  # downloaded; the folder that sweeps/grpo_cppo names


def test_there_are_commands():
    assert len(LINES) >= 18 and {line.split()[1] for line in LINES} <= set(COMMANDS)


@pytest.mark.parametrize("line", LINES)
def test_a_command_names_nothing_that_is_not_there(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, verb, *words = shlex.split(line)
    before = [word for other in LINES[: LINES.index(line)] for word in shlex.split(other)]
    made = MADE | {word.partition("=")[2] for word in before if word.startswith("folder=")}
    made |= {word for flag, word in pairwise(before) if flag == "--out"}
    own = words[words.index("--out") + 1] if "--out" in words else None
    for word in words:
        if "/" in word and "=" not in word and word not in shipped_recipes() and word != own:
            assert word in made or (ROOT / word).is_file(), word
        assert not re.search(r"\.(ya?ml|jsonl?)$", word) or word.partition(".")[0].isupper() or (ROOT / word).is_file()
    if verb in ("train", "explain", "calibrate") and words[0] not in made:
        assert find_recipe(words[0]).is_file()
        resolve(words[0], [word for word in words[1:] if "=" in word])
