"""Other frameworks' names of metrics; tests/docs/test_docs.py has the table beside that of the glossary."""

import pytest

from proxima.core import Importance, mismatch_metrics
from proxima.core.correction.importance import CapFloor
from proxima.experiments.metric_names import APPLIED, METRIC_ALIASES, canonical_metric
from proxima.experiments.run_reader import metric_of
from tests.core.batches import make_batch


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("mismatch_kl", "mismatch/kl"),
        ("rollout_is_mean", "mismatch/rollout_is_mean"),
        ("rollout_is_veto_fraction", "correction/rollout_is_veto_fraction"),
        ("mismatch/mismatch_training_ppl", "mismatch/training_ppl"),
        ("rollout_corr/k3_kl", "mismatch/k3_kl"),
        ("actor/rollout_corr/rollout_is_mean", "mismatch/rollout_is_mean"),
        ("rollout_corr/log_ppl_abs_diff", "mismatch/log_ppl_diff_abs"),
        ("rollout_corr/rollout_is_veto_fraction", "correction/rollout_is_veto_fraction"),
        ("mismatch_kl/mean", "mismatch/k3_kl"),
        ("grpo_actor/behav_imp_weight/avg", "correction/rollout_is_mean"),
        ("ppo_actor/update/behave_imp_weight/avg", "correction/rollout_is_mean"),
        ("grpo_actor/grad_norm", "grad_norm"),
        ("mismatch/rollout_is_catastrophic_token_fraction", "mismatch/rollout_is_catastrophic_token_fraction"),
        ("rewards/accuracies", "rewards/accuracies"),  # ours too, of a step of DPO; `accuracy` is of the evaluations
        ("no_such_metric", "no_such_metric"),
    ],
)
def test_a_name_of_another_framework_is_ours(name: str, ours: str) -> None:
    assert canonical_metric(name) == ours


def test_every_mismatch_alias_leads_to_a_metric_that_is_measured() -> None:
    measured = mismatch_metrics(make_batch([4]))
    for ours in METRIC_ALIASES.values():
        assert not ours.startswith("mismatch/") or ours in measured
        assert canonical_metric(ours) == ours


def test_every_alias_of_a_weight_leads_to_a_metric_of_the_correction() -> None:
    measured = CapFloor()(make_batch([4])).metrics
    weights = [ours for name, ours in METRIC_ALIASES.items() if name.startswith(("behav_", "behave_"))]
    assert len(weights) == 10 and set(weights) <= measured.keys()
    applied = Importance(normalise=True)(make_batch([4])).metrics
    assert {f"correction/rollout_is_{name}" for name in APPLIED} <= applied.keys()


def test_a_record_is_read_under_any_name_old_records_too() -> None:
    assert metric_of({"mismatch/k3_kl": 0.1}, "mismatch_k3_kl") == 0.1
    assert metric_of({"loss": 1.0}, "mismatch_kl") is None
    assert metric_of({"kl": 0.3, "reference_kl/mean": 0.4}, "kl") == 0.3  # what is recorded comes before its alias
