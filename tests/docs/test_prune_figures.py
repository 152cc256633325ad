"""The figures of pruning show what the selection does."""

import re

from proxima.core.selection.dropping import Prune
from proxima.view.chart import svg_file
from scripts.prune_figures import REWARDS, AllocationFigure, PipelineFigure, pruned
from tests.docs.printed import ROOT


def test_the_kept_of_the_pipeline_are_those_of_the_largest_advantage():
    advantage, keep = pruned(REWARDS, Prune(rate=0.75))
    assert [i for i, it in enumerate(keep) if it] == [1, 3]  # rewards 3 and 0 of a mean of 1.19
    assert [round(a, 2) for a in advantage[:4]] == [-0.22, 2.15, -0.22, -1.41]
    assert "rate 0.75 of 8 keeps k = 2" in svg_file(PipelineFigure())


def test_allocation_fills_the_slots_of_an_update():
    drawn = svg_file(AllocationFigure())
    texts = re.findall(r">([^<>]+)</text>", drawn)
    assert "Allocation: rate 0.875, G = 16, k = 2: 8 times as many prompts fill an update" in texts
    assert {"2 of 16 slots of the update", "16 of 16 slots of the update"} <= set(texts)
    half = svg_file(AllocationFigure(spec=Prune(rate=0.5, allocate=True)))
    assert "8 of 16 slots of the update" in half


def test_the_page_has_both_and_the_split_of_the_gradient():
    page = (ROOT / "docs/algorithms/prune.md").read_text(encoding="utf-8")
    assert "(prune.svg)" in page and "(prune_allocation.svg)" in page
    assert "[ r_t A_i + β (π_ref/π - 1) ] ∇ log π" in page
