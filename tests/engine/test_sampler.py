"""The sampler against brute force: what may be drawn, with which probability, and both log-probs."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from proxima.data.random import completion_uniforms
from proxima.engine.local import sampler
from proxima.engine.local.sampler import SamplingRows, sample_tokens
from proxima.engine.protocol import Sampling


def settings(n, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    def column(value, dtype):
        return torch.tensor(value if isinstance(value, list) else [value] * n, dtype=dtype)

    return SamplingRows(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.long),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
    )


def brute(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution of one row in plain Python, float64: softmax, top-k, top-p, min-p, renormalised. Ties at the
    edge all stay."""
    scaled = [x / temperature for x in logits]
    top = max(scaled)
    weight = [math.exp(x - top) for x in scaled]
    total = sum(weight)
    p = [w / total for w in weight]
    if top_k:
        edge = sorted(p, reverse=True)[min(top_k, len(p)) - 1]
        p = [x if x >= edge else 0.0 for x in p]
    if top_p < 1:
        kept = sorted((x for x in p if x), reverse=True)[: top_k or None]
        mass, edge = 0.0, kept[0]
        for x in kept:
            if mass >= top_p * sum(kept):
                break
            edge, mass = x, mass + x
        p = [x if x >= edge else 0.0 for x in p]
    if min_p:
        p = [x if x >= min_p * max(p) else 0.0 for x in p]
    return [x / sum(p) for x in p]


@pytest.mark.slow
@example(logits=[-0.5, 4.0], temperature=0.3, top_k=2, top_p=1.0, min_p=0.0, u=0.5)  # 1 − 3e-7 and 3e-7
@given(
    logits=st.lists(st.sampled_from([-3.0, -1.0, -0.5, 0.0, 0.5, 2.0, 4.0]), min_size=1, max_size=9),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([1e-6, 0.05, 0.35, 0.8, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.15, 0.7]),
    u=st.floats(0, 1, exclude_max=True, width=32),
)
def test_ties_and_every_truncation_together(logits, temperature, top_k, top_p, min_p, u):
    case = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    p = brute(logits, **case)
    given = torch.tensor([logits]), settings(1, **case), torch.tensor([u])
    out, plain = sample_tokens(*given, masks=True), sample_tokens(*given)
    assert plain.sets == [] and plain.columns == out.columns
    truncated = top_k > 0 or top_p < 1 or min_p > 0
    sure = 0 if top_p == 1 else 1e-5  # the mass that is compared with top_p is a sum in float32
    likely, possible = ({v for v, x in enumerate(p) if x > least and truncated} for least in (sure, 0))
    ids = out.sets[0].tolist()
    assert likely <= set(ids) <= possible and ids == sorted(ids)
    token = int(out.columns["tokens"])
    assert p[token] > 0, "a token outside the truncation was drawn"
    assert float(out.columns["sampled_log_prob"]) == pytest.approx(math.log(p[token]), abs=1e-5)
    whole = math.log(brute(logits, temperature)[token])
    assert float(out.columns["untruncated_log_prob"]) == pytest.approx(whole, abs=1e-5)
    below = sum(p[:token])
    assert below - 1e-5 <= u <= below + p[token] + 1e-5


@pytest.mark.parametrize(
    ("temperature", "min_p", "kept"),
    [(0.5, 0.2, 2), (0.5, 0.1, 3), (1.0, 0.3, 3), (1.0, 0.5, 2), (2.0, 0.7, 2), (2.0, 0.5, 3)],
)
def test_min_p_is_a_share_of_the_highest_probability_at_the_temperature(temperature, min_p, kept):
    """Weights 1, .37, .14 at temperature 1/2; 1, .61, .37 at 1; 1, .78, .61 at 2."""
    logits = torch.tensor([[0.0, -0.5, -1.0, -20.0]])
    out = sample_tokens(logits, settings(1, temperature, min_p=min_p), torch.tensor([0.0]), masks=True)
    assert out.sets[0].tolist() == [*range(kept)]


def test_the_top_k_that_are_reported_are_of_the_whole_distribution():
    """A teacher's buckets are compared with them; truncation concerns only what is drawn."""
    logits = torch.tensor([[0.6, 0.1, 0.3], [0.1, 0.7, 0.2]]).log()
    out = sample_tokens(logits.clone(), settings(2, top_k=1), torch.tensor([0.5, 0.5]), top=2)
    assert out.columns["top_k"].tolist() == [[0, 2], [1, 2]]
    expected = torch.tensor([[0.6, 0.3], [0.7, 0.2]]).log()
    torch.testing.assert_close(out.columns["top_k_log_prob"], expected)
    assert out.columns["sampled_log_prob"].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


def test_greedy_takes_the_largest_and_reports_temperature_one():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, -1.0]])
    out = sample_tokens(logits.clone(), settings(2, temperature=0.0, top_k=1, top_p=0.1), torch.tensor([0.99, 0.99]))
    assert out.columns["tokens"].tolist() == [1, 0]
    expected = logits.log_softmax(dim=1)[[0, 1], [1, 0]]
    torch.testing.assert_close(out.columns["sampled_log_prob"], expected)
    torch.testing.assert_close(out.columns["untruncated_log_prob"], expected)


@pytest.fixture
def sorted_tokens(monkeypatch):
    """The number of tokens of each sort from now on."""
    asked, inner = [], sampler._smallest_kept
    monkeypatch.setattr(sampler, "_smallest_kept", lambda *given: asked.append(given[-1]) or inner(*given))
    return asked


def test_candidates_that_hold_the_mass_are_all_that_is_sorted(sorted_tokens):
    """Ten tokens of equal mass, and thousands of next to none."""
    logits = torch.zeros(1, 5000)
    logits[0, 100:110] = 30.0
    kept, _ = sampler.truncate(logits, settings(1, top_p=0.55))
    assert kept.isfinite().nonzero()[:, 1].tolist() == [*range(100, 110)], "ties stay"
    assert sorted_tokens == [sampler.CANDIDATES]


@pytest.mark.parametrize(("top_p", "top_k"), [(0.5, 0), (0.9, 0), (0.7, 2000), (0.9, 1500)])
def test_mass_beyond_the_candidates_forces_the_full_sort(top_p, top_k, sorted_tokens):
    """A flat distribution over more tokens than CANDIDATES: half its mass doesn't fit into them."""
    vocabulary = 5000
    logits = 0.1 * torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(2))
    kept, _ = sampler.truncate(logits.clone(), settings(3, top_p=top_p, top_k=top_k))
    assert sorted_tokens[-1] == (top_k or vocabulary) and sorted_tokens[0] == max(top_k, sampler.CANDIDATES)
    p = logits.double().softmax(dim=1)
    for i in range(3):
        order = p[i].argsort(descending=True)[: top_k or None]
        mass = p[i][order].cumsum(0) / p[i][order].sum()
        expected = int((mass < top_p).sum()) + 1
        finite = kept[i].isfinite()
        assert abs(int(finite.sum()) - expected) <= 2  # float32 sums of thousands of terms
        assert finite[order[: expected - 2]].all()


def test_a_token_of_no_probability_is_never_drawn():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, -math.inf, 1.0, -math.inf]])
    for u in (0.0, 1e-8, 0.26894, 0.5, 1 - 2**-24):
        out = sample_tokens(logits.clone(), settings(1), torch.tensor([u]))
        assert int(out.columns["tokens"]) in (1, 4)
    assert int(sample_tokens(logits.clone(), settings(1), torch.tensor([0.0])).columns["tokens"]) == 1
    assert int(sample_tokens(logits.clone(), settings(1), torch.tensor([1 - 2**-24])).columns["tokens"]) == 4


def test_uniform_numbers_are_of_their_counter_alone():
    a = completion_uniforms(7, 3, 1, 50)
    assert (a == completion_uniforms(7, 3, 1, 50)).all() and (a[:20] == completion_uniforms(7, 3, 1, 20)).all()
    assert a.min() >= 0 and a.max() < 1 and a.dtype.name == "float32"
    keys = [(s, p, k) for s in (0, 1, -1) for p in (0, 1, 1 << 40) for k in range(4)]
    rows = torch.tensor([list(completion_uniforms(*key, 30)) for key in keys])
    assert len({tuple(row) for row in rows.tolist()}) == len(keys)
    correlation = torch.corrcoef(rows - rows.mean(1, keepdim=True)).fill_diagonal_(0)
    assert correlation.abs().max() < 0.75  # 30 numbers a row: independent ones stay well below


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extra", [{}, {"top": 2}, {"masks": True}])
def test_a_row_has_the_bits_that_it_has_alone(dtype, extra):
    torch.manual_seed(6)
    kinds = [
        Sampling(),
        Sampling(top_p=0.9),
        Sampling(top_k=40, top_p=0.9),
        Sampling(temperature=0.0),
        Sampling(top_k=9, min_p=0.1),
    ]
    logits, uniform, device = (3 * torch.randn(50, 4_096)).to(dtype), torch.rand(50), torch.device("cpu")
    together = sample_tokens(logits, SamplingRows.of(kinds * 10, device), uniform, **extra)
    assert len(together.sets) == (50 if extra.get("masks") else 0)
    for row in range(50):
        own = slice(row, row + 1)
        alone = sample_tokens(logits[own], SamplingRows.of([kinds[row % 5]], device), uniform[own], **extra)
        assert [ids.tolist() for ids in together.sets[own]] == [ids.tolist() for ids in alone.sets]
        for name, value in alone.columns.items():
            assert torch.equal(together.columns[name][own], value), (name, row)


def test_settings_may_be_whole_numbers():
    torch.manual_seed(7)
    logits, uniform, device = torch.randn(8, 64).bfloat16(), torch.rand(8), torch.device("cpu")
    given = [Sampling(temperature=2, top_p=1, min_p=0)] * 8
    drawn, expected = (
        sample_tokens(logits, SamplingRows.of(rows, device), uniform)
        for rows in (given, [Sampling(temperature=2.0)] * 8)
    )
    assert torch.equal(drawn.columns["tokens"], expected.columns["tokens"])
    assert torch.equal(drawn.columns["sampled_log_prob"], expected.columns["sampled_log_prob"])
