"""Records worked out by hand: every slot, and what is wrong with one."""

import json
from typing import Any

import pytest

from proxima.check.by_hand_records import check_record
from proxima.data import UserError
from tests.cli.conftest import here, proxima  # noqa: F401  fixtures


def by_hand(**changes: Any) -> dict[str, Any]:
    """-A r at ratio 1 and advantage 2, by hand."""
    inputs = {"mask": [[1, 1]], "log_prob": [[-0.5, -1.0]], "proximal_log_prob": [[-0.5, -1.0]], "advantage": [2.0]}
    expected = {"loss": -2.0, "grad_log_prob": [[-1.0, -1.0]], "keep": [[1, 1]], "metrics": {"ratio_mean": 1.0}}
    record = {"name": "ratio_one", "source": "by hand", "surrogate": {"kind": "ppo_clip"}, "inputs": inputs}
    return {**record, "expected": expected, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"surrogate": "ppo_clip", "aggregate": "token_sum"}, "loss: -4, expected -2"),
        ({"expected": {"loss": -2.1}}, "loss: -2, expected -2.1"),
        ({"expected": {"loss": -2.0, "lozz": 1}}, "nothing of ours computes 'lozz'; there are "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    assert check_record(by_hand()).status == check_record(by_hand(source="hand")).status == "passed"
    result = check_record(by_hand(**changes))
    assert result.status == "FAILED" and message in result.detail


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{"surrogate": None}], "golden record 'ratio_one' names no spec; add one of surrogate, "),
        ([{"surrogate": "ppo_clap"}], "did you mean 'ppo_clip'"),
        ([{"surrogate": "my_lab.losses:Mine"}], "add --import-code"),
        ([{"expected": {}}], "golden record 'ratio_one': 'expected' is empty"),
        ([{"inputs": {}}], "golden record 'ratio_one': 'inputs' is empty"),
        ([{"name": 3}], "'name' must be a text"),
        ([{"expected": {"loss": "high"}}], "expected.loss must be numbers"),
        ([{"inputs": {"mask": [[1], [1, 1]]}}], "inputs.mask must be numbers, in rows of equal length"),
        ([{"inputs": {"mask": [[1]], "advantage": [1.0]}}], "golden record 'ratio_one': "),
        (
            [{}, {"source": "verl 0.9"}],
            "entry 1: golden record 'ratio_one' is of 'verl 0.9', not by hand; check it with",
        ),
        ([{}, {"inputs": []}], "error: mine.json: entry 1: golden record 'ratio_one': 'inputs' is a list"),
        ([{}, {"corection": "importance"}], "entry 1: golden record 'ratio_one' has the unknown keys corection"),
        ([], "mine.json: holds no record; give a JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_faulty_record_is_refused(changes: list[dict[str, Any]], message: str, proxima, here) -> None:  # noqa: F811
    (here / "mine.json").write_text(json.dumps([by_hand(**changed) for changed in changes]))
    code, out, err = proxima("check", "mine.json")
    assert (code, out) == (2, "") and err.count("\n") == 1 and message in err


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
    result = check_record({"name": "x", "source": "by hand", **specs, "inputs": inputs, "expected": expected})
    assert (result.status, result.detail) == ("passed", "")


@pytest.mark.parametrize(
    ("specs", "inputs", "message"),
    [
        ({"reward_kl": {}}, {"log_prob": [-1]}, "inputs: score is missing"),
        ({"proximal": "next"}, {"old_log_prob": [-1]}, "there is no 'old_log_prob' here; did you mean"),
        ({"preference": "hinge"}, {"chosen": [-1]}, "inputs: rejected is missing; PreferencePairs documents it"),
        ({"selection": "balance"}, {"reward": [1], "group": [1], "advantages": [1]}, "no field 'advantages'"),
    ],
)
def test_an_input_by_hand_that_is_wrong_is_named(specs: dict[str, Any], inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        check_record({"name": "x", "source": "by hand", **specs, "inputs": inputs, "expected": {"loss": 0}})
    assert message in str(refused.value)


def test_the_command(proxima, here):  # noqa: F811
    (here / "mine.json").write_text(json.dumps([by_hand(), by_hand(name="wrong", expected={"loss": 1.0})]))
    code, out, err = proxima("check", "mine.json")
    assert (code, err) == (1, "") and out.splitlines() == [
        "passed   ratio_one",
        "FAILED   wrong: loss: -2, expected 1",
        "         so the code is not the formula",
        "file mine.json: 1 passed, 1 FAILED, 0 skipped",
    ]
    _, out, _ = proxima("check", "mine.json", "--json")
    assert [row["status"] for row in json.loads(out)["results"]] == ["passed", "FAILED"]
    assert proxima("check", "mine.json", "epsilon=1")[0] == 2
