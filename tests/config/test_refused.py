"""Overrides that are refused or odd, as a user types them: each line has the remedy, before anything is loaded."""

import shlex
from pathlib import Path

import pytest

from proxima.config.problems import ConfigError
from proxima.config.resolution import resolve
from proxima.config.validate import check, warnings

_, *PARTS = Path(__file__).with_name("refused.txt").read_text(encoding="utf-8").split("\n== ")
FILES = {  # of the part "checked beside files"
    "data/questions.jsonl": "{}",
    "folder/file.txt": "",
    "here/file.txt": "",
    "m/config.json": '{"max_position_embeddings": 64, "model_type": "llama", "vocab_size": 32}',
    "models/smollm2-135m-instruct/config.json": "{}",
    "runs/a/config.yaml": "{}",
    "runs/a/metrics.jsonl": "",
}
ENTRIES = [  # part, overrides, lines
    (part.partition("\n")[0], overrides, lines)
    for part in PARTS
    for overrides, *lines in (entry.splitlines() for entry in part.split("\n$ ")[1:])
]


@pytest.mark.parametrize(("part", "overrides", "lines"), ENTRIES, ids=[f"{entry[0]}: {entry[1]}" for entry in ENTRIES])
def test_what_is_said_of_them(recipe, part, overrides, lines):
    name, words = recipe(), shlex.split(overrides)
    for path, text in FILES.items() if part == "checked beside files" else ():
        recipe(text, path)
    if part == "read":
        with pytest.raises(ConfigError) as caught:
            resolve(name, words)
        problems = caught.value.problems
    else:
        resolved = resolve(name, words)
        problems = check(resolved)
    if part == "odd":
        assert problems == []
        problems = warnings(resolved)
    said = [str(problem) for problem in problems]
    assert len(said) == len(lines)
    for text, line in zip(said, lines, strict=True):
        assert text.startswith(line[:-1]) if line.endswith("…") else text == line
