"""Which log-probs an engine gives under a sampling, and what is said when the loss reads another."""

import pytest

from proxima.data import UserError
from proxima.engine.http.server_checks import check_log_probs, check_scoring, precision_notes
from proxima.engine.protocol import BOTH, Capabilities, EngineRequirements, Sampling
from tests.engine.helpers import unloaded

NOTHING, SAMPLED, UNTRUNCATED = frozenset(), frozenset({"sampled"}), frozenset({"untruncated"})
PLAIN, CUT = Sampling(), Sampling(top_p=0.9)
WARM, WARM_CUT = Sampling(temperature=0.7), Sampling(temperature=0.7, top_k=20)


def found(mode: str, *, score: bool = False) -> Capabilities:
    return Capabilities(score=score, scores_any_temperature=mode == "both", log_probs=mode)


def needs(**fields) -> EngineRequirements:
    return EngineRequirements(model=unloaded(), **fields)


@pytest.mark.parametrize(
    ("mode", "score", "expected"),
    [
        ("both", False, [BOTH, BOTH, BOTH, BOTH]),
        ("processed", False, [BOTH, SAMPLED, BOTH, SAMPLED]),
        ("processed", True, [BOTH, BOTH, BOTH, SAMPLED]),  # scoring gives softmax(logits): temperature 1 alone
        ("untruncated", False, [BOTH, UNTRUNCATED, BOTH, UNTRUNCATED]),
        ("raw", True, [BOTH, UNTRUNCATED, NOTHING, NOTHING]),
    ],
)
def test_the_columns_that_an_engine_fills(mode, score, expected):
    assert [found(mode, score=score).log_probs_for(entry) for entry in (PLAIN, CUT, WARM, WARM_CUT)] == expected


def test_greedy_log_probs_are_of_temperature_one():
    assert found("raw").log_probs_for(Sampling(temperature=0)) == BOTH


@pytest.mark.parametrize(
    ("mode", "sampling", "name", "says"),
    [
        ("raw", WARM, "untruncated", "--logprobs-mode processed_logprobs"),
        ("raw", CUT, "sampled", "sampling.top_p=1"),
        ("processed", WARM_CUT, "untruncated", "sampling.top_k=0"),
        ("untruncated", CUT, "sampled", "algorithm.behavior=untruncated"),
    ],
)
def test_a_log_prob_that_the_loss_reads_is_refused_with_the_remedy(mode, sampling, name, says):
    with pytest.raises(UserError) as caught:
        check_log_probs(needs(training=sampling, log_probs=frozenset({name})), found(mode), "server S")
    assert f"{name}_log_prob" in caught.value.reason and "server S" in caught.value.reason
    assert f"sampling.temperature={sampling.temperature:g}" in caught.value.reason
    assert says in caught.value.remedy and "\n" not in str(caught.value)


def test_a_log_prob_that_only_metrics_read_is_reported():
    (note,) = check_log_probs(needs(training=WARM, measured=UNTRUNCATED), found("raw"), "server S")
    assert "mismatch/ metrics are absent" in note
    assert check_log_probs(needs(training=PLAIN, log_probs=UNTRUNCATED), found("raw"), "server S") == []
    assert check_log_probs(needs(samplings=(WARM,)), found("raw"), "server S") == []  # nothing is trained on


def test_scoring_at_another_temperature_is_refused():
    reference = needs(role="reference", score_temperatures=(0.7,))
    with pytest.raises(UserError, match="softmax\\(logits\\) alone, and sampling.temperature is 0.7"):
        check_scoring(reference, found("processed", score=True), "server S")
    with pytest.raises(UserError, match="does not score tokens, which the reference is for"):
        check_scoring(reference, found("processed"), "server S")
    check_scoring(reference, found("both", score=True), "local")  # it divides by the temperature
    check_scoring(needs(score_temperatures=(1.0,)), found("raw", score=True), "server S")


@pytest.mark.parametrize(
    ("trainer", "dtype", "quantization", "warned"),
    [
        ("bfloat16", "bfloat16", None, False),
        ("bfloat16", "float32", None, False),
        ("float32", "bfloat16", None, True),
        ("bfloat16", "bfloat16", "fp8", True),
        ("bfloat16", "float8_e4m3fn", None, True),
        ("bfloat16", None, None, False),
    ],
)
def test_coarse_weights_without_a_correction_are_reported(trainer, dtype, quantization, warned):
    facts = {"dtype": dtype, "quantization": quantization, "engine": "server S"}
    notes = precision_notes(needs(training=PLAIN, compute_dtype=trainer), **facts)
    assert len(notes) == warned
    assert all("kind: importance, level: token, bound: truncate, upper: 2" in note for note in notes)
    assert precision_notes(needs(training=PLAIN, compute_dtype=trainer, corrected=True), **facts) == []
