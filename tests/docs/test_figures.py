"""Measured figures of the pages are those of committed results."""

import re
from pathlib import Path

import pytest

from scripts.figures import FIGURES, README, ROOT, figure, updated


@pytest.mark.parametrize(("page", "words", "numbers"), FIGURES, ids=[words for _, words, _ in FIGURES])
def test_a_page_has_the_figures_of_the_result(page, words, numbers):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert updated(text, words, numbers) == text
    shown = words.format(*(figure(*one) for one in numbers))
    assert shown in text and updated(text.replace(shown, words.replace("{}", "77")), words, numbers) == text


def test_every_row_of_the_readme_is_measured():
    section = (ROOT / README).read_text(encoding="utf-8").partition("## Benchmarks")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .* \|$", section, flags=re.MULTILINE)
    told = [words.format(*(figure(*one) for one in numbers)) for page, words, numbers in FIGURES if page == README]
    assert len(rows) >= 5
    assert [row for row in rows if re.search(r"\d", row.rpartition(" | ")[2]) and not any(t in row for t in told)] == []


def test_words_that_a_page_lacks_are_refused():
    with pytest.raises(ValueError, match="occurs 0 times"):
        updated("nothing", FIGURES[0][1], FIGURES[0][2])
    assert Path(ROOT / FIGURES[0][0]).is_file()
