"""Metrics of a run are found under the names of other frameworks."""

import json

import pandas as pd
import pytest

import proxima
from proxima.experiments.metric_names import METRIC_ALIASES
from tests.experiments.runs import make_run

STEPS = [
    {"kind": "train", "step": 1, "approx_kl_k1": 0.1, "reward/mean": 0.5, "mismatch/k3_kl": 0.01},
    {"kind": "eval", "step": 1, "label": "step", "accuracy": 0.25},
    {"kind": "train", "step": 2, "approx_kl_k1": 0.2, "reward/mean": 0.75, "mismatch/k3_kl": 0.02},
]


@pytest.fixture
def metrics(tmp_path):
    return proxima.load_run(make_run(tmp_path / "run", STEPS)).metrics


def test_a_peers_name_gives_our_column(metrics):
    assert list(metrics["actor/ppo_kl"]) == list(metrics["approx_kl_k1"]) == [0.1, 0.2]
    assert list(metrics["critic/rewards/mean"]) == [0.5, 0.75]
    for name in ("rollout_corr/k3_kl", "mismatch/mismatch_k3_kl", "mismatch_k3_kl", "actor/rollout_corr/k3_kl"):
        assert list(metrics[name]) == [0.01, 0.02] and name in metrics
    assert list(metrics[["reward/mean", "approx_kl/avg"]].columns) == ["reward/mean", "approx_kl_k1"]
    assert list(metrics.head(1)["actor/ppo_kl"]) == [0.1]  # a part of it is such a table, too
    assert list(metrics[metrics["reward"] > 0.5].index) == [2] and metrics.get("actor/ppo_kl").name == "approx_kl_k1"


def test_no_column_is_there_twice(metrics, tmp_path):
    ours = ["approx_kl_k1", "reward/mean", "mismatch/k3_kl"]
    assert list(metrics.columns) == ours and isinstance(metrics, pd.DataFrame)
    assert metrics.to_csv(tmp_path / "m.csv") is None
    assert (tmp_path / "m.csv").read_text().splitlines()[0] == ",".join(["step", *ours])
    assert json.loads(metrics.to_json()).keys() == set(ours)


def test_an_evaluation_has_them_too(tmp_path):
    assert list(proxima.load_run(make_run(tmp_path / "run", STEPS)).evaluations["eval_accuracy"]) == [0.25]


def test_an_unknown_name_suggests(metrics):
    for name, words in (
        ("reward/maen", "no metric 'reward/maen'; did you mean 'reward/mean'?"),
        ("actor/ppo_lk", "did you mean 'actor/ppo_kl'?"),
        ("actor/grad_norm", "no metric 'actor/grad_norm': here it is 'grad_norm', which this run has not recorded"),
        ("zzz", "known: approx_kl_k1, mismatch/k3_kl, reward/mean"),
    ):
        with pytest.raises(KeyError, match="no metric") as caught:
            metrics[name]
        assert words in str(caught.value), name
    assert metrics.get("zzz") is None and "zzz" not in metrics and "actor/grad_norm" not in metrics


def test_every_name_of_the_table_finds_its_metric():
    from proxima.api.metrics_frame import MetricsFrame

    table = MetricsFrame([dict.fromkeys(METRIC_ALIASES.values(), 1.0)])
    assert len(METRIC_ALIASES) > 100
    assert [name for name, ours in METRIC_ALIASES.items() if table[name].name != ours] == []


def test_a_run_without_records_has_an_empty_table(tmp_path):
    empty = proxima.load_run(make_run(tmp_path / "run", [])).metrics
    assert empty.empty
    with pytest.raises(KeyError, match="this run has not recorded; there are none"):
        empty["reward/mean"]
