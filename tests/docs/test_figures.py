"""Measured figures of the pages are those of committed results."""

import json
import re
from pathlib import Path

import pytest

from scripts import figures
from scripts.figures import FIGURES, README, ROOT, figure, updated


@pytest.mark.parametrize(("page", "words", "numbers"), FIGURES, ids=[words for _, words, _ in FIGURES])
def test_a_page_has_the_figures_of_the_result(page, words, numbers):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert updated(text, words, numbers) == text
    shown = words.format(*(figure(*number) for number in numbers))
    assert shown in text and updated(text.replace(shown, words.replace("{}", "77")), words, numbers) == text


def test_every_row_of_the_readme_is_measured():
    section = (ROOT / README).read_text(encoding="utf-8").partition("## Benchmarks")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .* \|$", section, flags=re.MULTILINE)
    messages = [
        words.format(*(figure(*number) for number in numbers)) for page, words, numbers in FIGURES if page == README
    ]
    assert len(rows) >= 5
    assert [
        row for row in rows if re.search(r"\d", row.rpartition(" | ")[2]) and not any(t in row for t in messages)
    ] == []


def test_words_that_a_page_lacks_are_refused():
    with pytest.raises(ValueError, match="occurs 0 times"):
        updated("nothing", FIGURES[0][1], FIGURES[0][2])
    assert Path(ROOT / FIGURES[0][0]).is_file()


def test_a_figure_is_the_range_over_all_results(tmp_path, monkeypatch):
    folder = tmp_path / "benchmarks" / "decode" / "results"
    folder.mkdir(parents=True)
    for name, processor, ratio in (
        ("2026-01-01_2-cores.json", "Fast CPU", 9.0),  # counts, though there is a newer one of its machine
        ("2026-01-02_2-cores.json", "Slow CPU", 3.125),
        ("2026-01-03_2-cores.json", "Fast CPU", 2.25),
        ("2026-01-04_2-cores_long.json", "Slow CPU", 99.0),  # of other settings
        ("2026-01-04_16-cores_nvidia-h200.json", "Slow CPU", 99.0),
    ):
        machine = {"processor": processor, "system": "Linux"}
        (folder / name).write_text(json.dumps({"machine": machine, "ratio": ratio, "all": 10}))
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    figures.results.cache_clear()
    try:
        assert figure("decode", "ratio", ".1f") == "2.2 to 9.0" and figure("decode", "ratio", ".0%") == "225 to 900 %"
        assert figure("decode", "ratio over all", ".0%") == "22 to 90 %"
        assert figure("decode", "ratio", "02.0f") == "02 to 09"
        assert figure("decode", "all", ".0f") == "10"  # they agree
        assert (figure("decode", "runs", ""), figure("decode", "machines", "")) == ("3", "2")
        assert figure("decode", "dates", "") == "2026-01-01 to 2026-01-03"
        for before in ("| 3.1 × |", "| 2 to 3.1 × |", "| 2.2 to 9.0 × |"):
            assert updated(before, "| {} × |", (("decode", "ratio", ".1f"),)) == "| 2.2 to 9.0 × |"
    finally:
        figures.results.cache_clear()
