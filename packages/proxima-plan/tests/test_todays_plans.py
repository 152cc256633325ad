"""The figures of six plans, to six digits. A formula that is changed on purpose changes them: the test then shows
the new ones, which have to agree with the measurements of the pages before they are written to todays_plans.json."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from proxima_plan.engine_settings import EngineSettings

from .plans import LOAD, planned

FIGURES = json.loads(Path(__file__).with_name("todays_plans.json").read_text(encoding="utf-8"))
AHEAD = replace(LOAD, lag=1, shared=True, kept=1024, passes=2, forwards=2.5)
ALONE = replace(LOAD, checkpointing=True, micro_tokens=4096, engine=EngineSettings(eager=True))
PLANS = {
    "full": {},
    "tensor and context": {"tensor_parallel": 4, "context_parallel": 2, "load": AHEAD},
    "hybrid experts": {"expert_parallel": 8, "kind": "hybrid", "sum_gradients": "micro_batch"},
    "beside": {"model": "qwen2.5-32b", "engines": 4, "beside": 16, "each": 4, "load": AHEAD},
    "replicated": {"model": "qwen3-4b", "devices": "8xH200-141G", "engines": 8, "each": 1, "kind": "replicate"},
    "eager, on two nodes": {"model": "qwen2.5-32b", "engines": 2, "each": 16, "load": ALONE},
}


def figures(plan):
    """By a path of names."""
    seconds, binds = plan.times.decode_step(64, 1000)
    out = {"decode step": seconds, "decode step by": binds, "prefill": plan.times.prefill(10_000, 500)}
    for stage in plan.stages:
        out |= {f"{stage.name}, {part}": value for part, value in stage.parts.items()}
        out |= {f"{stage.name} sends, {where}": size for where, size in stage.sent.items()}
    memory = plan.memory
    for side, kinds in (("trainer", memory.trainer), ("engine", memory.engine)):
        out |= {f"{side}, {kind}": size for kind, size in kinds.items()}
    out |= {name: getattr(memory, name) for name in ("slots", "needed", "host", "share", "server", "least", "room")}
    out |= {"micro batch": plan.micro_batch, "layout": str(plan.layout)}
    return {name: float(f"{value:.6g}") if isinstance(value, int | float) else value for name, value in out.items()}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_has_the_figures_of_today(name):
    found, known = figures(planned(**PLANS[name])), FIGURES[name]
    words = {key for key, value in known.items() if isinstance(value, str)}
    assert {key: found[key] for key in words} == {key: known[key] for key in words}
    numbers = {key: value for key, value in known.items() if key not in words}
    assert {key: value for key, value in found.items() if key not in words} == pytest.approx(numbers, rel=2e-6)
