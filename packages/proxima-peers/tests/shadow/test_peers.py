"""Dumps that the peers' own code made: all are explained, by the conventions that their code has; a planted bug is not.

make_dumps.py makes them, with what it needs. They are made with the lines of docs/shadow.md."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

from proxima_peers.cli.shadow_report import failed
from proxima_peers.shadow import (
    advantage_choices,
    aggregate_choices,
    loss_terms,
    metric_choices,
    token_advantage_choices,
    weight_choices,
)
from proxima_peers.shadow.dump import read_dump
from proxima_peers.shadow.stages import first_disagreement, stages

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "shadow.md"
MICRO = ("over", "a micro-batch, then the mean of the micro-batches")
ANSWERS = ("mean", "of the answers' means")
ANSWER_SUMS = ("mean", "of the answers' sums")
TRL_EPSILON = {("epsilon", "0.0001")}
ANSWER = ("ratio of", "the answer, gradient of the token's own")
RATIO_KL = ("KL", "k3 times the ratio")
OLD = ("ratio to", "the log-probs recomputed before the update")

# stage: what the peer's code has in the place of what the settings state; a stage that is not here is the same
EXPLAINED = {
    "trl_grpo": {"advantages": TRL_EPSILON, "loss": {ANSWERS, RATIO_KL}},
    "trl_grpo_batch": {"advantages": TRL_EPSILON, "loss": {ANSWERS, RATIO_KL}},
    "trl_bnpo": {"advantages": TRL_EPSILON, "loss": {MICRO}},
    "trl_dr_grpo": {
        "advantages": {("divided by", "nothing")},
        "loss": {("mean", "of the answers' sums, over the longest answer allowed")},
    },
    "trl_dapo": {"advantages": TRL_EPSILON},
    "trl_dapo_truncated": {"advantages": TRL_EPSILON},
    "trl_delta": {
        "advantages": TRL_EPSILON,
        "loss": {MICRO, ("bound where A < 0", "of the ratio before the clip, whatever A is")},
    },
    "trl_cispo": {
        "advantages": TRL_EPSILON,
        "loss": {("clip range", "the upper number is the bound itself, no lower one")},
    },
    "trl_sapo": {"advantages": TRL_EPSILON, "loss": {ANSWERS}},
    "trl_luspo": {
        "advantages": TRL_EPSILON,
        "loss": {ANSWER_SUMS, ("ratio of", "the answer, gradient through the mean")},
    },
    "trl_gspo": {"advantages": TRL_EPSILON, "loss": {ANSWERS}},
    "trl_on_policy": {"advantages": TRL_EPSILON, "loss": {MICRO}},
    "verl_token_mean_local": {"loss": {MICRO}},
    "verl_token_mean_global": {},
    "verl_seq_mean_token_mean": {"loss": {ANSWERS}},
    "verl_sum_norm_width": {"loss": {("mean", "of the answers' sums, over the padded width")}},
    "verl_low_var_kl": {"loss": {("KL", "k3")}},
    "verl_rollout_weights": {"weights": {("weight of", "the token")}},
    "verl_gspo": {"loss": {ANSWERS}},
    "verl_rfpp_baseline": {
        "advantages": {("divided by", "the deviation of what is left, over the loss tokens"), ("epsilon", "1e-08")}
    },
    "verl_gae": {"advantages": {("KL in the reward", "k3"), ("standardised", "over the tokens in the loss")}},
    "areal_decoupled": {"loss": {OLD}},
    "areal_sequence": {"loss": {OLD, ("ratio of", "the answer, gradient through the mean")}},
    "areal_dual_clip": {"loss": {OLD}},
    "areal_capped": {"loss": {OLD}},
    "unirl_grpo": {"loss": {MICRO}},
    "unirl_empty_answer": {
        "mask": {("tokens in the loss", "without answers cut at the limit")},
        "loss": {ANSWERS, ("answers without a token", "are counted")},
    },
    "unirl_horizon": {"loss": {("mean", "of the answers' sums, over the longest answer allowed")}},
}
# where the bug acts first
BUGS = {"mask": "loss", "group": "advantages", "ratio": "loss", "kl": "loss", "stale": "loss", "weight": "loss"}


def dump_of(name):
    return read_dump(str(HERE / "dumps" / f"{name}.npz"))


@pytest.mark.slow
def test_they_are_28_and_6():
    assert (len(EXPLAINED), len(BUGS)) == (28, 6)
    assert {file.stem for file in (HERE / "dumps").glob("*.npz")} == {*EXPLAINED, *(f"bug_{name}" for name in BUGS)}
    assert sum(file.stat().st_size for file in (HERE / "dumps").glob("*.npz")) < 300_000
    peers = {dump_of(name).settings.peer for name in EXPLAINED}
    assert peers == {"trl 1.16.0", "verl 0.9.1", "areal 1.0.4", "unirl 0.2.0"}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPLAINED)
def test_a_step_of_a_peer_is_explained_by_what_its_code_does(name):
    made = {stage.name: stage for stage in stages(dump_of(name))}
    assert not failed(list(made.values()))
    for stage in ("advantages", "weights", "mask", "loss"):
        if stage not in EXPLAINED[name]:
            assert made[stage].verdict in ("same", "not recomputed"), made[stage]
            continue
        assert made[stage].verdict == "explained"
        assert EXPLAINED[name][stage] in [set(match.departures) for match in made[stage].found.nearest]
    assert made["gradient"].verdict == made["loss"].verdict
    assert [match.convention for match in made["gradient"].found.matches] == [
        match.convention for match in made["loss"].found.matches
    ]


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [True, False], ids=["with_its_gradient", "of_the_loss_alone"])
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_not_explained_away(bug, gradient):
    dump = dump_of(f"bug_{bug}")
    if not gradient:
        arrays = {name: value for name, value in dump.arrays.items() if name != "grad_log_prob"}
        dump = replace(dump, arrays=arrays, settings=replace(dump.settings, metrics={}))
    made = list(stages(dump))
    assert failed(made)
    wrong = [stage.name for stage in made if stage.verdict == "unexplained"]
    assert wrong[0] == BUGS[bug]
    if bug == "weight":  # of the stated level, which is explained, comes before it
        assert first_disagreement(made).name == "weights"
    else:
        assert first_disagreement(made).name == BUGS[bug]


def test_each_bug_changes_the_dump_of_the_step_that_it_is_planted_in():
    for bug, name in (
        ("mask", "token_mean_global"),
        ("kl", "low_var_kl"),
        ("stale", "gspo"),
        ("weight", "rollout_weights"),
    ):
        planted = dump_of(f"bug_{bug}")
        plain = dump_of(f"verl_{name}")
        assert float((planted["loss"] - plain["loss"]).abs()) > 1e-4
        same = ("mask", "log_prob", "old_log_prob", "advantage", "reward", "group")
        assert all(bool((planted[key] == plain[key]).all()) for key in same)


def test_the_lines_of_the_page_are_python():
    blocks = re.findall(r"```python\n# (\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [peer for peer, _ in blocks] == ["trl", "verl", "areal", "unirl", "own"]
    for _, code in blocks:
        ast.parse(code)


def test_every_choice_of_the_tables_is_on_the_page():
    page = PAGE.read_text().replace("\\|", "|")
    tables = (
        *(
            advantage_choices.CENTRES,
            advantage_choices.DEVIATIONS,
            advantage_choices.PLACES,
            advantage_choices.ALONE_IS,
        ),
        *(weight_choices.LEVELS, weight_choices.BOUNDS, weight_choices.NUMERATORS, weight_choices.MASKS),
        *(loss_terms.CENTRES, loss_terms.RATIOS, loss_terms.RANGES, loss_terms.DUALS, loss_terms.CLAMPS),
        *(token_advantage_choices.POLICIES, token_advantage_choices.TOKENS, token_advantage_choices.STANDARDS),
        *(loss_terms.SUMS, aggregate_choices.EMPTY_IS, aggregate_choices.COUNTED),
    )
    choices = {choice for table in tables for choice in table.values()} | {*loss_terms.ESTIMATES, *metric_choices.KLS}
    names = vars(aggregate_choices).items()
    choices |= {value for name, value in names if name.isupper() and isinstance(value, str) and len(value) > 8}
    cells = {
        cell for row in page.splitlines() if row.startswith("| ") for cell in re.split(r"; | \| |, (?=k|−|\|)|: ", row)
    }
    said = {cell.strip("| ") for cell in cells} | {cell.strip() for cell in cells}
    assert {choice for choice in choices if choice not in said and choice.strip("|") not in said} == set()
