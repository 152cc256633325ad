"""The experiment on one batch: what its lines say, and that lines that exist are not repeated."""

import asyncio
import json
from dataclasses import replace
from itertools import count

import pytest

from evidence.mechanism import run, summary
from evidence.start_model import make_start_model


@pytest.mark.slow
def test_every_mask_starts_alike_and_is_measured_once(tmp_path, monkeypatch):
    for name, value in (("PROMPTS", 2), ("GROUP", 2), ("UPDATES", 2), ("FRESH", 2), ("ASKED", (2,))):
        monkeypatch.setattr(run, name, value)
    turns = count()  # a random model is never right: here every other answer is
    setting = replace(run.SETTINGS["chain_15"], reward=lambda text, answer: float(next(turns) % 2 == 0))
    monkeypatch.setitem(run.SETTINGS, "chain_15", setting)
    folder, out = make_start_model(tmp_path / "start", hidden=32, layers=1), tmp_path / "results.jsonl"
    for _ in range(2):
        asyncio.run(run.measure(folder, "chain_15", [1], out, tuple(run.MASKS)))
    lines = {line["mask"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert list(lines) == list(run.MASKS) and len(out.read_text().splitlines()) == len(lines)
    firsts = [line["steps"][0] for name, line in lines.items() if name != "score_centering"]
    assert firsts[0]["kl"] > 0
    for step in firsts:  # π is μ: nothing is masked yet
        assert step["kl"] == pytest.approx(firsts[0]["kl"], rel=1e-3)
    assert lines["none"]["steps"][1]["masked_negative"] == lines["none"]["steps"][1]["masked_positive"] == 0
    assert len(firsts[0]["kl_at"]) == run.POSITIONS
    for step in (step for line in lines.values() for step in line["steps"]):
        by_sign = [step[f"masked{sign}_at"] for sign in ("", "_positive", "_negative")]
        assert all(len(shares) == run.POSITIONS for shares in by_sign)
        assert all(min(p, n) - 1e-6 <= both <= max(p, n) + 1e-6 for both, p, n in zip(*by_sign, strict=True))
    assert all(0 <= line["steps"][1]["return"] <= 1 and "return" not in line["steps"][0] for line in lines.values())


def test_the_correlation_of_ranks():
    assert summary.spearman([1, 2, 3], [10, 20, 15]) == pytest.approx(0.5)
    assert summary.spearman([1, 2, 3], [3, 2, 1]) == -1
    assert summary.spearman([1, 1, 2], [1, 1, 1]) == 0
