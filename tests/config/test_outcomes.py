"""What the fields that are `auto` become, and how a config takes it."""

import typing

import pytest
import yaml

from proxima.config.describe import all_fields, fields_of, kinds_of
from proxima.config.families import FAMILIES
from proxima.config.outcomes import (
    decided_in,
    dtype_outcomes,
    outcome_lines,
    outcomes_of,
    settled,
    settled_as,
    undecided_dtypes,
)
from proxima.config.resolution import resolve
from proxima.config.resolved import dump
from proxima.config.schema import RunConfig
from proxima.model import precision
from proxima.model.precision import ComputeDtype, DtypeChoice

SCORER = {"kind": "model", "path": "scorer"}
WEIGHTS = {"ModelConfig.dtype", "ModelReward.dtype"}  # of the master weights
SERVERS = {"Serve.dtype"}  # which have an `auto` of their own


@pytest.fixture
def slow(monkeypatch):
    """A processor without bfloat16 instructions."""
    monkeypatch.setattr(precision, "_measured", lambda: DtypeChoice("float32", "measured"))


BASE = {
    "model": {"path": "org/model"},
    "task": {"kind": "tests.config.fakes:Sums"},
    "reward": ["number"],
    "algorithm": "cppo",
}
EVERYWHERE = BASE | {  # each dtype that a recipe can leave to the machine
    "algorithm": {"preset": "distill", "distillation": {"path": "teacher", "engine": {"kind": "local"}}},
    "reward": [SCORER],
    "eval": {"task": "arithmetic", "sets": [{"name": "more", "task": "arithmetic", "reward": [SCORER]}]},
}


PATHS = {
    "model.compute_dtype",
    "reward.0.compute_dtype",
    "algorithm.distillation.engine.dtype",
    "engine.dtype",
    "eval.sets.0.reward.0.compute_dtype",
}


def classes():
    """Every config class of every way to train, with the classes of the kinds in their slots."""
    found, left = set(), [family.root for family in FAMILIES.values()] + [RunConfig]
    while left:
        cls = left.pop()
        if cls in found:
            continue
        found.add(cls)
        for _, info in all_fields(cls):
            left += [] if info.section is None else [info.section]
            left += [] if info.slot is None else list(kinds_of(info.slot).values())
    return found


def test_every_dtype_of_products_is_left_to_the_machine():
    named = {}
    for cls in classes():
        for info in fields_of(cls):
            if {"bfloat16", "float32"} <= set(typing.get_args(info.hint)):
                named[f"{info.owner.__name__}.{info.name}"] = info
    assert {"ModelConfig.compute_dtype", "ModelReward.compute_dtype", "Local.dtype", "LocalProcess.dtype"} <= set(named)
    for name, info in named.items():
        decided = info.hint == ComputeDtype and info.default == "auto"
        assert decided or name in WEIGHTS | SERVERS, name


def test_each_is_decided(slow):
    resolved = resolve(EVERYWHERE)
    outcomes = list(dtype_outcomes(resolved.config))
    assert {outcome.path for outcome in outcomes} == PATHS == set(undecided_dtypes(resolved.config))
    config, decided = settled(resolved.config, resolved, outcomes)
    assert decided.config is config and undecided_dtypes(config) == []
    assert {decided.entry(path).value for path in PATHS} == {"float32"}
    assert config.reward[0].compute_dtype == config.eval.sets[0].reward[0].compute_dtype == "float32"
    assert resolve(yaml.safe_load(dump(decided))).config == config
    assert "compute_dtype: float32" in dump(decided) and "# auto: measured" in dump(decided)


def test_what_the_recipe_names_stays(slow):
    resolved = resolve(BASE, ["engine.dtype=bfloat16"])
    outcomes = list(dtype_outcomes(resolved.config))
    assert [outcome.path for outcome in outcomes] == ["model.compute_dtype"]
    config, _ = settled(resolved.config, None, outcomes)
    assert (config.model.compute_dtype, config.engine.dtype) == ("float32", "bfloat16")


@pytest.mark.parametrize(
    "override", ["model.dtype=bfloat16", "placement={kind: torchrun, sharding: {param_dtype: bfloat16}}"]
)
def test_weights_in_bfloat16_are_multiplied_in_it(slow, override):
    config = resolve(BASE, [override]).config
    values = {outcome.path: outcome.value for outcome in dtype_outcomes(config)}
    assert values == {"model.compute_dtype": "bfloat16", "engine.dtype": "float32"}


def test_an_earlier_decision_is_kept(slow):
    config = resolve(EVERYWHERE).config
    earlier = resolve(EVERYWHERE, ["engine.dtype=bfloat16", "reward.0.compute_dtype=bfloat16"]).config
    kept = {"engine.dtype": "bfloat16", "reward.0.compute_dtype": "bfloat16"}
    assert decided_in(earlier, config) == kept
    written = {"engine": {"dtype": "bfloat16"}, "reward": [{"compute_dtype": "bfloat16"}]}
    assert decided_in(written, config) == kept
    assert settled_as(config, earlier).engine == earlier.engine
    trained_alone = {"model": {"compute_dtype": "bfloat16"}, "sft": {}}
    assert decided_in(trained_alone, config)["engine.dtype"] == "bfloat16"


def test_outcomes_of_one_reason_are_one_line(slow):
    line, *_ = outcome_lines(outcomes_of(resolve(BASE).config))
    assert line == "model.compute_dtype and engine.dtype = float32: measured"


def test_what_kernels_lack_is_said_where_they_would_compute(monkeypatch):
    monkeypatch.setattr("proxima.config.outcomes.unavailable", lambda needed=None: needed and f"no {needed}")
    named = ["engine.dtype=float32", "model.compute_dtype={}"]
    lines = {
        dtype: [
            line
            for line in outcome_lines(outcomes_of(resolve(BASE, [word.format(dtype) for word in named]).config))
            if line.startswith("kernels")
        ]
        for dtype in ("bfloat16", "float32")
    }
    assert lines == {"bfloat16": ["kernels = C++ for training alone: no avx512_bf16"], "float32": []}


def test_explain_says_it(slow):
    from proxima.cli.explanation import facts_of, text_of

    resolved = resolve(BASE)
    assert "auto     model.compute_dtype and engine.dtype = float32: measured" in text_of(resolved)
    assert facts_of(resolved)["auto"][0] == {"path": "model.compute_dtype", "value": "float32", "reason": "measured"}
