"""A completion that several servers write in pieces, under weights that change: no piece is lost, doubled or of other
weights than it says."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proxima.core.loss import check_values
from proxima.data import UserError
from proxima.data.columns import SamplingMask
from proxima.engine.http.answer_checks import WrongAnswerError
from proxima.engine.http.dialect import Chunk
from proxima.engine.http.generation_job import CompletionRules, GenerationJob, JobSegment
from proxima.engine.protocol import EngineSetup
from proxima.model.positions import context_limit
from proxima.model.pretrained import load_config
from tests.core.batches import packed
from tests.engine.http.fake_model import STOP
from tests.engine.http.plain_servers import RULES, requests
from tests.tiny import tiny_tokenizer

LETTER = 1


def new_job(*, rules=RULES, **sampling):
    """A job of a prompt of three tokens, and the list that gets its completion."""
    (request,) = requests(1, 1, **sampling)
    delivered = []
    return GenerationJob(request, rules, delivered.append), delivered


def chunk(count, *, token=LETTER, reason=None, **fields):
    return Chunk(tokens=[token] * count, log_prob=[-1.0] * count, finish_reason=reason, **fields)


def asked_for(job):
    request = job.token_request("name", salt=None, seeded=True, chunk_tokens=1)
    return request.sampling.max_tokens


@st.composite
def attempts(draw):
    """The parts of one attempt, each of other weights: a version and how many tokens; whether the server names the
    versions at its end; and what becomes of the attempt."""
    versions = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    parts = [(version, draw(st.integers(0, 3))) for version in versions]
    return parts, draw(st.booleans()), draw(st.sampled_from(["keep", "discard", "forget"]))


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(attempts(), max_size=4))
def test_what_is_kept_are_the_tokens_whose_weights_are_known(all_attempts):
    """Those up to the first change of weights during an attempt, or all of them if the server names their versions."""
    job, delivered = new_job(max_tokens=60)
    kept, number = [], 0
    for parts, names_versions, end in all_attempts:
        assert asked_for(job) == 60 - len(kept) == job.limit - job.length
        segment, written, spans = job.begin(parts[0][0]), [], []
        for place, (version, count) in enumerate(parts):
            if place:
                segment.marks.append((len(segment.tokens), version))
            spans.append((f"label {version}", len(written), len(written) + count))
            tokens = [(number + i) % STOP for i in range(count)]
            number += count
            written += [(token, -0.5 - token, version) for token in tokens]
            last = names_versions and place == len(parts) - 1
            job.append(
                Chunk(
                    tokens=tokens,
                    log_prob=[-0.5 - token for token in tokens],
                    version_spans=tuple(spans) if last else None,
                ),
                {f"label {version}": version for version, _ in parts},
            )
        known = written if names_versions else written[: parts[0][1]]
        if end == "keep":
            assert job.keep() == len(known)
            kept += known
        elif end == "discard":
            assert job.discard() == len(written)
        else:
            job.keep()
            assert job.forget(segment) == len(known)
        assert job.length == len(job.tokens) == len(kept)
        assert job.policy_version.tolist() == [version for _, _, version in kept]
        assert job.in_flight().tokens.tolist() == [token for token, _, _ in kept]
    job.finish("abort")
    (completion,) = delivered
    assert completion.tokens.tolist() == [token for token, _, _ in kept]
    assert completion.sampled_log_prob.tolist() == [log_prob for _, log_prob, _ in kept]
    assert completion.policy_version.tolist() == [version for _, _, version in kept]


@pytest.mark.parametrize("left", [1, 2, 5])
@pytest.mark.parametrize("wanted", [1, 2, 5])
def test_a_completion_has_what_is_asked_for_and_what_the_context_holds(wanted, left):
    rules = replace(RULES, max_length=3 + left)
    job, _ = new_job(rules=rules, max_tokens=wanted)
    most = min(wanted, left)
    assert asked_for(job) == most
    job.begin(0)
    assert job.append(chunk(most), {}) is None  # the message with the reason is still to come
    assert job.append(chunk(0, reason="length"), {}) == "length"
    with pytest.raises(WrongAnswerError, match=f"more than the {most} tokens that were asked for"):
        job.append(chunk(1), {})


def test_a_prompt_that_fills_the_context_is_refused():
    with pytest.raises(UserError, match="3 tokens; the limit, one new token included, is 3"):
        new_job(rules=replace(RULES, max_length=3))


def test_an_answer_that_ends_for_its_length_is_as_long_as_was_asked_for():
    """Counted over all pieces: a later piece is asked only for what is missing."""
    job, _ = new_job(max_tokens=5)
    job.begin(0)
    job.append(chunk(2), {})
    assert job.keep() == 2 and asked_for(job) == 3
    job.begin(0)
    with pytest.raises(WrongAnswerError, match="ended for its length after 4 of 5 tokens"):
        job.append(chunk(2, reason="length"), {})
    assert job.discard() == 4 - 2
    job.begin(0)
    assert job.append(chunk(3, reason="length"), {}) == "length"
    assert job.keep() == 3 and job.reason == "length"


def test_a_piece_that_reaches_the_length_ends_the_completion():
    job, _ = new_job(max_tokens=3)
    job.begin(0)
    job.append(chunk(2), {})
    assert job.keep() == 2 and job.reason is None
    job.begin(0)
    job.append(chunk(1), {})
    assert job.keep() == 1 and job.reason == "length"


def test_what_follows_a_stop_token_is_no_part_of_the_completion():
    job, _ = new_job()
    job.begin(0)
    assert job.append(Chunk(tokens=[LETTER, STOP, LETTER], log_prob=[-1.0] * 3), {}) == "stop"
    assert job.tokens.tolist() == [LETTER, STOP]
    assert len(job.current.log_probs) == 2


def test_a_stop_without_a_stop_is_no_answer():
    """No stop token, and no stop strings asked for; or no token at all."""
    job, _ = new_job()
    job.begin(0)
    with pytest.raises(WrongAnswerError, match="ends no completion"):
        job.append(chunk(2, reason="stop"), {})
    job, _ = new_job(stop=("a",))
    job.begin(0)
    with pytest.raises(WrongAnswerError, match="ends no completion"):
        job.append(chunk(0, reason="stop"), {})
    job.begin(0)
    assert job.append(chunk(1, reason="stop"), {}) == "stop"


def test_after_an_attempt_whose_weights_changed_the_reason_is_open_again():
    """The end was among the tokens that are dropped."""
    job, _ = new_job(max_tokens=4)
    segment = job.begin(1)
    job.append(chunk(2), {})
    segment.marks.append((2, 2))
    job.reason = job.append(chunk(2, reason="length"), {})
    assert job.keep() == 2 and job.reason is None
    assert asked_for(job) == 2


@pytest.mark.parametrize(
    ("tokens", "log_prob", "said"),
    [
        ([-1], [-1.0], "token -1 of a vocabulary"),
        ([RULES.vocabulary], [-1.0], f"token {RULES.vocabulary} of a vocabulary"),
        ([0], [math.nan], "a log-prob is nan"),
        ([0], [0.01], "a log-prob is 0.01, above 0"),
    ],
)
def test_impossible_tokens_and_log_probs_are_no_answer(tokens, log_prob, said):
    job, _ = new_job()
    job.begin(0)
    with pytest.raises(WrongAnswerError, match=said):
        job.append(Chunk(tokens=tokens, log_prob=log_prob), {})
    with pytest.raises(WrongAnswerError, match="a log-prob is"):
        job.append(Chunk(tokens=[0], log_prob=[-1.0], sampled_log_prob=[math.inf]), {})
    assert job.append(Chunk(tokens=[0, RULES.vocabulary - 1], log_prob=[0.0, -1.0]), {}) in (None, "stop")


def test_a_log_prob_that_rounding_raised_above_0_can_be_trained_on():
    """A server may round more than the loss allows."""
    job, delivered = new_job()
    job.begin(0)
    job.append(Chunk(tokens=[0, 1], log_prob=[9e-4, -1.0], sampled_log_prob=[9e-4, -1.0]), {})
    job.finish("abort")
    sampled = torch.from_numpy(delivered[0].sampled_log_prob)
    assert sampled.tolist() == [0.0, -1.0]
    check_values(packed(log_prob=sampled, behavior_log_prob=sampled, advantage=torch.ones(2)))


def test_the_answer_to_another_prompt_is_none():
    job, _ = new_job()
    prompt = job.request.prompt.tokens.tolist()
    job.begin(0)
    assert job.append(chunk(1, prompt_tokens=np.array(prompt, np.int32)), {}) is None
    job.keep()
    job.begin(0)
    with pytest.raises(WrongAnswerError, match="another prompt"):
        job.append(chunk(1, prompt_tokens=np.array(prompt, np.int32)), {})  # without the piece that is kept
    assert job.append(chunk(1, prompt_tokens=np.array([*prompt, LETTER], np.int32)), {}) is None


def test_a_greedy_request_truncates_nothing():
    """The server's log-prob of the largest logit would be 0 under a truncation."""
    for temperature, top_k in ((0.0, 0), (0.7, 5)):
        job, _ = new_job(temperature=temperature, top_k=5)
        sent = job.token_request("name", salt=None, seeded=False, chunk_tokens=1)
        assert (sent.sampling.top_k, sent.seed) == (top_k, None)


def test_pieces_have_draws_of_their_own():
    job, _ = new_job()
    first = job.token_request("name", salt=None, seeded=True, chunk_tokens=1)
    again = job.token_request("name", salt=None, seeded=True, chunk_tokens=1)
    job.begin(0)
    job.append(chunk(2), {})
    job.keep()
    later = job.token_request("name", salt=None, seeded=True, chunk_tokens=1)
    assert first.seed == again.seed != later.seed
    assert list(later.tokens) == [*job.request.prompt.tokens, LETTER, LETTER]


def test_of_a_completion_under_a_grammar_no_piece_is_kept_but_the_whole():
    job, _ = new_job(max_tokens=4)
    job.request = replace(job.request, grammar="{}")
    job.begin(0)
    job.append(chunk(2), {})
    assert (job.keep(), job.length) == (0, 0)
    job.begin(0)
    job.append(chunk(4), {})
    assert (job.keep(), job.length) == (4, 4)


def test_a_sampling_mask_is_of_the_tokens_that_are_kept():
    """Also where an attempt is cut; and a greedy completion, which draws nothing, has none."""
    rules = replace(RULES, sampling_mask=True)
    job, delivered = new_job(rules=rules, top_k=2)
    sets = [[0, LETTER], [LETTER, 4], [LETTER], [2, LETTER], [LETTER, 3]]

    def masked(first, last):
        return chunk(last - first, sampling_mask=SamplingMask.of_sets(sets[first:last]))

    segment = job.begin(1)
    job.append(masked(0, 1), {})
    job.append(masked(1, 2), {})
    segment.marks.append((2, 2))
    job.append(masked(2, 3), {})
    assert job.keep() == 2
    job.begin(2)
    job.append(masked(3, 5), {})
    job.keep()
    job.finish("abort")
    mask = delivered[0].sampling_mask
    kept = sets[:2] + sets[3:]
    assert [sorted(mask.ids[a:b].tolist()) for a, b in pairwise(mask.offsets)] == [sorted(each) for each in kept]
    for temperature, wanted in ((0.0, False), (0.5, True)):
        other, _ = new_job(rules=rules, top_k=2, temperature=temperature)
        assert other.masked is wanted


@pytest.mark.parametrize("spans", [None, [(3, 0, 1)], [(3, 0, 1), (4, 1, 1)]])
@pytest.mark.parametrize("confirmed", [False, True])
@pytest.mark.parametrize("tokens", [[], [LETTER]])
def test_tokens_are_unverified_until_the_server_names_or_confirms_their_weights(tokens, confirmed, spans):
    segment = JobSegment([(0, 3)], tokens=tokens, spans=spans, confirmed=confirmed)
    assert segment.is_unverified == (tokens != [] and spans is None and not confirmed)
    assert not segment.is_mismatched
    for version in (3, 4, 5):
        segment.mismatched = {version}
        assert segment.is_mismatched == (version in [named for named, _, _ in spans or ()])


def test_a_sampling_for_which_the_servers_report_no_log_probs_is_refused():
    raw = replace(RULES, log_probs="raw")
    for temperature in (0.0, 1.0):
        job, _ = new_job(rules=raw, temperature=temperature)
        assert job.failures == job.length == 0
    with pytest.raises(
        UserError, match=r"sampling\.temperature=0\.7, and the server reports log-probs of temperature 1"
    ):
        new_job(rules=raw, temperature=0.7)


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "held"), [(None, 0), (-1, -1), (0, 0), (1, 0)])
def test_the_context_is_the_models_or_a_shorter_one_that_is_asked_for(asked, held, tiny_model):
    path = str(tiny_model("llama"))
    context = context_limit(load_config(path).get_text_config())
    longest = None if asked is None else context + asked
    setup = EngineSetup(model_path=path, tokenizer=tiny_tokenizer(), load_weights=None, max_length=longest)
    rules = CompletionRules.of(setup)
    assert rules.max_length == context + held
    assert rules.routes is None and not rules.sampling_mask and not rules.latest_routes
