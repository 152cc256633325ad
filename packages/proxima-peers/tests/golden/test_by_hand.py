"""Records worked out by hand, of every slot."""

from typing import Any

import pytest

from proxima_peers.verify.verification import verify_record


@pytest.mark.parametrize(
    ("specs", "inputs", "expected"),
    [
        (
            {"correction": {"kind": "importance", "upper": 1.5}},
            {
                "mask": [[1, 1]],
                "log_prob": [[-1, -1]],
                "proximal_log_prob": [[-1, -1]],
                "behavior_log_prob": [[-1, -3]],
            },
            {"weight": [[1.0, 1.5]], "keep": [[1, 1]]},
        ),
        (
            {"penalty": {"kind": "k2", "coefficient": 0.5}},
            {"mask": [[1, 0]], "log_prob": [[-1, "nan"]], "reference_log_prob": [[-3, 0]]},
            {"penalty": [[1.0, 0.0]], "loss": 1.0, "grad_log_prob": [[1.0, 0.0]]},
        ),
        (
            {"aggregate": {"kind": "sequence_mean_token_mean"}},
            {"loss_mask": [1, 1, 1], "cu_seqlens": [0, 2, 3], "loss": [1.0, 3.0, 4.0]},
            {"loss": 3.0, "denominator": 2.0, "grad_loss": [0.25, 0.25, 0.5]},
        ),
        ({"advantage": "rloo"}, {"reward": [1, 0, 0], "group": [7, 7, 7]}, {"advantage": [1.0, -0.5, -0.5]}),
        (
            {"advantage": {"kind": "gae", "gamma": 0.5, "lam": 1.0, "whiten": False}},
            {"reward": [0, 1], "value": [0.25, 0.5], "loss_mask": [1, 1], "cu_seqlens": [0, 2]},
            {"advantage": [0.25, 0.5]},
        ),
        (
            {"selection": {"kind": "prune", "rate": 0.5, "allocate": True}},
            {"reward": [0, 0], "group": [3, 3], "advantage": [1, -2]},
            {"keep": [0, 1], "prompts_factor": 2, "keeps_size": 1},
        ),
        (
            {"preference": {"kind": "hinge", "beta": 0.5}},
            {"chosen": [-1.0, -1.0], "rejected": [-2.0, -5.0]},
            {"pair_loss": [0.5, 0.0], "loss": 0.25, "grad_chosen": [-0.25, 0.0], "grad_rejected": [0.25, 0.0]},
        ),
        (
            {"reward_kl": {"coefficient": 0.5}},
            {
                "score": [1],
                "log_prob": [-1, -2],
                "reference_log_prob": [-2, -2],
                "loss_mask": [1, 1],
                "cu_seqlens": [0, 2],
            },
            {"reward": [-0.5, 1.0], "total": [0.5], "paid": [0.5], "kl": [0.5], "next_coefficient": 0.5},
        ),
        (
            {"proximal": "loglinear"},
            {"behavior_log_prob": [-1], "log_prob": [-2], "policy_version": [3], "current_version": 5},
            {"proximal_log_prob": [-1.5]},
        ),
        (
            {"mismatch": {"max_k3_kl": 0.1}},
            {"loss_mask": [1, 1], "cu_seqlens": [0, 1, 2], "log_prob": [-1, -3], "behavior_log_prob": [-1, -2]},
            {
                "exceeded": 1,
                "rejects": [0, 1],
                "metrics": {"mismatch/k3_kl": 0.18393972058572117},
                "health": {"mismatch/k3_kl": 2},
            },
        ),
    ],
)
def test_every_slot_by_hand(specs: dict[str, Any], inputs: dict[str, Any], expected: dict[str, Any]) -> None:
    verdict = verify_record({"name": "x", "source": "by hand", **specs, "inputs": inputs, "expected": expected})
    assert (verdict.status, verdict.differences) == ("matched", ())
