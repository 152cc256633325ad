"""Every law of engines fails for an engine with the defect that it is there for, and passes for a sound one."""

import functools

import numpy as np
import pytest

from proxima.engine import ENGINES
from proxima.engine.local.local_engine import Local
from proxima.engine.protocol import EngineSetup
from proxima.laws import engine_laws
from proxima.laws.engine_case import EngineUnderTest, tiny_model
from proxima.laws.engine_laws import ENGINE_LAWS
from proxima.laws.law import check_law
from proxima.laws.sampling_laws import FALSE_ALARM, chi_squared, tail_of_chi_squared
from tests.laws import broken_engines as broken
from tests.laws.broken_engines import Broken


@pytest.fixture(scope="module")
def loaded():
    return functools.cache(tiny_model)


def checked(law, spec, loaded):
    (chosen,) = (entry for entry in ENGINE_LAWS if entry.name == law)
    setup = EngineSetup.of(loaded())
    return check_law(chosen, EngineUnderTest(spec, setup, loaded, dtype="float32"))


DEFECTS = [
    (broken.AnswersNothing, "runs", "raised RuntimeError: no answer"),
    (broken.OffByATwentieth, "trainer_log_probs", "untruncated_log_prob is 0.05 nats off the trainer's"),
    (broken.RawLogProbs, "temperature", "nats off"),
    (broken.WrongTemperature, "frequencies", "tokens are not drawn as their log-probs say"),
    (broken.IgnoresTruncation, "truncation", "top_k=2: tokens that it leaves out were drawn"),
    (broken.UntruncatedAsSampled, "truncation", "sampled_log_prob is"),
    (broken.NeverGreedy, "greedy", "nats below the best"),
    (broken.TopKOfItsOwn, "defaults", "tokens were drawn beyond the 20 most probable ones, "),
    (broken.IgnoresStops, "stop_strings", "finish_reason 'length'"),
    (broken.StopsLate, "stop_strings", "tokens come after it"),
    (broken.CutsStops, "stop_strings", "the text does not end with it"),
    (broken.OneTooMany, "lengths", "max_tokens=1: 2 tokens"),
    (broken.EndsEarly, "lengths", "finish_reason 'length' after 0 tokens"),
    (broken.NanLogProb, "columns", "sampled_log_prob is not in (-inf, 0]"),
    (broken.OffByATwentieth, "log_probs", "log-probs are 0.05 nats off score()"),
    (broken.DependsOnTheQueue, "determinism", "differs with the queue reversed"),
    (broken.WithoutMasks, "sampling_masks", "sampling is truncated, and there is no sampling mask"),
    (broken.WideMasks, "sampling_masks", "a set of 64 tokens, over top_k=6"),
    (broken.OldVersion, "versions", "tokens carry versions {0}, but 3 was published"),
    (broken.ForgetsInFlight, "in_flight", "nothing was ever in flight"),
    (broken.AbortsOthers, "abort", "ended completions of prompt"),
    (broken.AbortsOtherSamples, "abort_samples", "ended others"),
    (broken.HangsAfterPause, "pause", "raised RuntimeError: can't resume"),
]


def test_every_law_has_a_defect():
    assert {law for _, law, _ in DEFECTS} == {law.name for law in ENGINE_LAWS}


@pytest.mark.slow
@pytest.mark.parametrize(("defect", "law", "message"), DEFECTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_defect_is_found(defect, law, message, loaded):
    result = checked(law, Broken(defect()), loaded)
    assert result.status == "FAILED" and message in result.detail, result


@pytest.mark.slow
@pytest.mark.parametrize("law", sorted(law.name for law in ENGINE_LAWS))
def test_a_sound_engine_passes(law, loaded):
    spec = Local(slots=16, dtype="float32", sampling_mask=law == "sampling_masks")
    assert checked(law, spec, loaded).status == "passed"


def test_the_engines_that_take_weights_are_checked():
    """tests/engine/test_local_process.py checks `local_process`, tests/engine/http/test_engine_laws.py servers."""
    assert {kind for kind, spec in ENGINES.items() if spec.needs_weights} == {"local", "local_process"}


@pytest.mark.parametrize(
    ("law", "reason"),
    [
        ("greedy", "no model to compare with: give --model FOLDER"),
        ("sampling_masks", "capabilities.sampling_mask is False"),
    ],
)
def test_a_law_that_does_not_apply_is_skipped(law, reason, loaded):
    (chosen,) = (entry for entry in ENGINE_LAWS if entry.name == law)
    result = check_law(chosen, EngineUnderTest(Local(dtype="float32"), EngineSetup.of(loaded())))
    assert (result.status, result.detail) == ("skipped", reason)


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


@pytest.mark.slow
def test_the_false_alarms_of_the_test_of_frequencies():
    """The chances of a sound sampler are uniform: of 2,000, about 2 % are below 0.02 and none below the limit."""
    random, p = np.random.default_rng(0), softmax(np.random.default_rng(1).normal(size=300) * 2)
    log_probs = dict(enumerate(np.log(p)))
    chances = [tail_of_chi_squared(*chi_squared(log_probs, random.choice(300, 400, p=p))) for _ in range(2000)]
    assert 0.01 < np.mean(np.array(chances) < 0.02) < 0.035 and min(chances) > FALSE_ALARM


@pytest.mark.parametrize("temperature", [0.8, 1.25])
def test_the_power_of_the_test_of_frequencies(temperature):
    """1,000 counted draws of a sampler at a wrong temperature are found, each time of 50."""
    random, logits = np.random.default_rng(0), np.random.default_rng(1).normal(size=300) * 2
    log_probs = dict(enumerate(np.log(softmax(logits))))
    wrong = softmax(logits / temperature)
    chances = [tail_of_chi_squared(*chi_squared(log_probs, random.choice(300, 1000, p=wrong))) for _ in range(50)]
    assert max(chances) < FALSE_ALARM


def test_chi_squared_by_hand():
    messages = {0: np.log(0.5), 1: np.log(0.25)}  # and a quarter for all others
    tokens = np.array([0] * 40 + [1] * 30 + [7] * 30)  # expected: 50, 25, 25
    assert chi_squared(messages, tokens) == (pytest.approx(100 / 50 + 25 / 25 + 25 / 25), 2)
    assert tail_of_chi_squared(4.0, 2) == pytest.approx(np.exp(-2.0))
    assert chi_squared({5: 0.0}, np.full(100, 5)) == (0.0, 0) and tail_of_chi_squared(0.0, 0) == 1.0


def test_an_engine_whose_dtype_is_left_to_the_machine_is_held_to_that_which_it_takes(monkeypatch):
    """In bfloat16 two forward passes may differ by what rounding does to the model."""
    cases = []
    monkeypatch.setattr(engine_laws, "check_laws", lambda laws, case: cases.append(case) or ())
    for spec in (Local(), Local(dtype="float32")):
        list(engine_laws.check_engine(spec))
    assert [(case.dtype, case.spec.dtype) for case in cases] == [("bfloat16", "bfloat16"), ("float32", "float32")]
