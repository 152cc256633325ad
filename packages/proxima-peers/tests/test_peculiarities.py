"""packages/proxima-peers/docs/peculiarities.md says of the peers what the golden records show."""

import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


def rows():
    """(id, what pins it) of every row of peculiarities.md."""
    text = (Path(__file__).parents[1] / "docs" / "peculiarities.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        if match := re.match(r"\| ([PTUAC]\d+) \|", line):
            cells = re.split(r"(?<!\\) \| ", line)
            assert len(cells) == 4, f"{match[1]}: {len(cells)} cells"
            yield match[1], cells[2]


def test_every_peculiarity_has_its_row():
    ids = [name for name, _ in rows()]
    expected = [
        f"{letter}{i}"
        for letter, last in (("P", 35), ("T", 21), ("U", 7), ("A", 7), ("C", 3))
        for i in range(1, last + 1)
    ]
    assert ids == expected


@pytest.fixture
def verdicts(golden):
    return {name: entry.verdict for name, entry in golden.items()}


def test_what_pins_a_peculiarity_pins_it(verdicts):
    """A record under "differs" differs for this reason and no other; one without is matched, or differs for a reason of
    its own."""
    for name, pinned in rows():
        differs = False
        for word, pattern in re.findall(r"(\*\*[Dd]iffers\*\*: |match(?:ed)?: )?`([^`]+)`", pinned):
            if pattern.startswith("tests/"):
                assert (ROOT / pattern).is_file(), pattern
                continue
            differs = "iffers" in word if word else differs
            values = [verdicts[record] for record in fnmatch.filter(verdicts, pattern)]
            assert values, f"{name}: no golden record is called {pattern}"
            if differs:
                assert {(v.status, v.reason) for v in values} == {("differs", name)}, f"{name}: {pattern}"
            else:
                assert any(v.status == "matched" for v in values) and not any(v.reason == name for v in values), (
                    f"{name}: {pattern}"
                )


def test_every_reason_to_differ_is_documented(verdicts):
    documented = {name for name, _ in rows()}
    used = {reason for v in verdicts.values() if v.status == "differs" for reason in str(v.reason).split(", ")}
    assert used and used <= documented


def test_the_ids_in_docstrings_and_pages_are_documented():
    documented = {name for name, _ in rows()}
    sources = [*(ROOT / "src" / "proxima" / "core").rglob("*.py"), DOCS / "algorithms" / "notes.yaml"]
    for path in sources:
        mentioned = re.findall(r"\(([PTUAC]\d+(?:, [PTUAC]\d+)*)[):]", path.read_text(encoding="utf-8"))
        unknown = {name for group in mentioned for name in group.split(", ")} - documented
        assert not unknown, f"{path.name}: {unknown}"
