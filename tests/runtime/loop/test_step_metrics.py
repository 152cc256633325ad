"""Numbers of a step for metrics.jsonl."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from proxima.config.sections.placement import RayPlacement
from proxima.runtime.loop import device_figures
from proxima.runtime.loop.step_review import mean_metrics, rollout_metrics
from proxima.system.device_memory import PeakMemory
from proxima.training.stack import UpdateResult
from tests.training.test_batch_builder import algorithm, group


def scored(uid, rewards, correct):
    """Each score has a part `p` and says whether the answer is right."""
    plain = group(uid, rewards)
    scores = (replace(s, parts={"p": s.value}, correct=correct) if s.valid else s for s in plain.scores)
    return replace(plain, scores=tuple(scores))


def test_parts_and_accuracy():
    chosen = algorithm().step_batch([scored(0, [1, 0, None], True), scored(1, [3, 4, 4], False)], 1)
    metrics = rollout_metrics(chosen.groups, chosen)
    assert metrics["accuracy"] == pytest.approx(2 / 5) and metrics["reward/part/p"] == pytest.approx(12 / 5)


def test_metrics_that_are_no_numbers_are_left_out():
    assert mean_metrics({"entropy": 0.5, "approx_kl": float("nan"), "ratio_max": float("inf"), "loss": 0.0}) == {
        "entropy/mean": 0.5,
        "loss": 0.0,
    }


def test_the_figures_of_the_devices(monkeypatch):
    """Four ranks make 600 FLOP in 3 s, of 200 that a product would make in a second."""
    monkeypatch.setattr(device_figures, "product_rate", lambda dtype, device: 200.0)
    model = SimpleNamespace(compute_dtype=None, device=None)
    stack = SimpleNamespace(ranks=SimpleNamespace(size=4), model=model)
    update = UpdateResult(updates=1, seconds=3.0, flops=600.0, memory=PeakMemory(7, 9))
    beside = RayPlacement(ranks=4, engines=2, gpus_per_engine=2.0)
    figures = device_figures.device_figures(update, stack, beside, tokens=400, seconds=10.0)
    assert figures == {
        "time/update": 3.0,
        "tokens_per_second/device": 5.0,
        "device/flops_per_second": 50.0,
        "device/mfu": 0.25,
    }
    measured = {"device/memory_allocated": 7.0, "device/memory_reserved": 9.0}
    assert device_figures.memory_figures(update, None) == measured
    assert device_figures.memory_figures(update, 8) == measured | {"device/memory_planned": 8.0}
    assert device_figures.memory_figures(UpdateResult(), 8) == {}
    unknown = device_figures.device_figures(UpdateResult(updates=1, seconds=3.0), stack, None, tokens=400, seconds=10.0)
    assert unknown == {"time/update": 3.0, "tokens_per_second/device": 10.0}
    assert device_figures.device_figures(UpdateResult(), stack, None, tokens=400, seconds=10.0) == {}
    for shared in (replace(beside, colocate=True, gpus_per_engine=1.0), replace(beside, engines=0)):
        assert device_figures.engine_devices(shared) == 0
    assert device_figures.engine_devices(replace(beside, gpus_per_rank=0.0, gpus_per_engine=0.0)) == 2


def test_the_planned_memory_is_asked_for_on_a_gpu(monkeypatch):
    """Of the package that has the command `plan`; what it can't plan, the run does not show."""
    command = SimpleNamespace(module="a_package.cli")
    asked = []

    def load(name):
        asked.append(name)
        return SimpleNamespace(memory_of_run=lambda resolved, device: 2**30 // resolved)

    gpu = torch.device("cuda")
    monkeypatch.setattr(device_figures, "entry_points", lambda **query: [command])
    monkeypatch.setattr(device_figures.importlib, "import_module", load)
    assert device_figures.planned_memory(2, gpu) == 2**29 and asked == ["a_package.forecast"]
    for resolved, device in ((None, gpu), (2, torch.device("cpu")), (0, gpu)):
        assert device_figures.planned_memory(resolved, device) is None
    monkeypatch.setattr(device_figures, "entry_points", lambda **query: [])
    assert device_figures.planned_memory(2, gpu) is None
