"""Which fields may differ, for whom."""

import pytest

from proxima.config.comparable import ABSENT, FIELD_CLASSES, Purpose, compared, differences, flat_values, may_differ
from proxima.config.resolution import resolve

EVERY_PURPOSE = set(Purpose)


@pytest.mark.parametrize(
    ("path", "purposes"),
    [
        ("folder", EVERY_PURPOSE),
        ("algorithm.preset", EVERY_PURPOSE),
        ("runtime.threads", EVERY_PURPOSE),
        ("placement.kind", EVERY_PURPOSE),
        ("placement.ranks", EVERY_PURPOSE),
        ("placement.sharding.sum_gradients", {Purpose.RESUME}),
        ("seed", {Purpose.CELL}),
        ("train.steps", {Purpose.RESUME, Purpose.ACCURACY}),
        ("eval.every", {Purpose.RESUME, Purpose.ACCURACY}),
        ("eval.task.high", {Purpose.RESUME}),
        ("checkpoint.keep_last", {Purpose.RESUME, Purpose.CELL}),
        ("runtime.max_lag", set()),  # changes results
        ("engine.kind", {Purpose.CHANGE}),
        ("engine.url", EVERY_PURPOSE),  # the same servers elsewhere
        ("engine.serve.port", {Purpose.RESUME, Purpose.CELL}),
        ("engine.serve.dtype", {Purpose.CHANGE}),
        ("engine.quantization", {Purpose.CHANGE}),
        ("train.optimizer.lr", {Purpose.CHANGE}),  # told with --accept-changes
        ("seeds", set()),
        ("a.field.of.tomorrow", set()),
    ],
)
def test_who_may_differ(path, purposes):
    assert {purpose for purpose in Purpose if may_differ(path, purpose)} == purposes


def test_every_classified_field_exists(recipe):
    entries = resolve(recipe(), ["algorithm=dapo", "eval.task.kind=tests.config.fakes:Sums"]).entries
    entries += resolve(recipe(), ["engine=local_process"]).entries
    entries += resolve(recipe(), ["engine={kind: vllm, serve: {}}"]).entries
    entries += resolve(recipe(), ["placement=torchrun"]).entries
    entries += resolve({"model": {"path": "a/b"}, "task": "arithmetic", "sft": {}}, root=None).entries
    names = {".".join(entry.path.split(".")[:end]) for entry in entries for end in range(1, 5)}
    assert set(FIELD_CLASSES) <= names


def test_differences_name_path_and_both_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    before = {"seed": 1, "model.path": "model", "train.steps": 3, "gone": 1}
    now = {"seed": 2, "model.path": str(tmp_path / "model"), "train.steps": 4, "new": 2}
    assert list(differences(before, now, Purpose.RESUME)) == [("seed", 1, 2), ("new", ABSENT, 2), ("gone", 1, ABSENT)]
    assert "seed" not in dict.fromkeys(path for path, *_ in differences(before, now, Purpose.CELL))
    assert compared(before, Purpose.RESUME).keys() == {"seed", "model.path", "gone"}


def test_flat_values_are_json_with_kinds(recipe):
    config = resolve(recipe(), ["algorithm.surrogate.delta=.inf", "algorithm.selection=[drop_uniform_groups]"]).config
    values = flat_values(config)
    assert values["task.kind"] == "tests.config.fakes:Sums" and values["reward"] == ["number"]
    assert values["algorithm.surrogate.delta"] == "inf" and values["algorithm.selection"] == ["drop_uniform_groups"]
    assert values["algorithm.reference_kl"] is None
    assert all(isinstance(value, str | int | float | list | dict | None) for value in values.values())
