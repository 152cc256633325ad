"""The packed layout: where each token lies, at which position, what predicts it; and what is refused."""

from dataclasses import replace
from itertools import pairwise, takewhile
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proxima.data import packed_batch
from proxima.data.packed_batch import pack
from proxima.data.trajectory import Trajectory


def trajectory(prompt=(1, 2, 3), tokens=(10, 11), group=0, **facts):
    return Trajectory(prompt_tokens=tuple(prompt), tokens=tuple(tokens), group=group, **facts)


def test_the_layout_of_a_shared_prompt():
    rows = [trajectory((1, 2, 3), (10, 11, 12)), trajectory((1, 2, 3), (20, 21)), trajectory((4, 5), (30, 31), group=1)]
    b = pack(rows)
    assert b.tokens.tolist() == [1, 2, 3, 10, 11, 20, 4, 5, 30]  # the last token of a response is not fed
    assert b.position.tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2]
    assert b.edges == (0, 3, 5, 6, 8, 9) and b.parents == (-1, 0, 0, -1, 3)
    assert b.predict.tolist() == [2, 3, 4, 2, 5, 7, 8] and b.target.tolist() == [10, 11, 12, 20, 21, 30, 31]
    assert b.cu_seqlens.tolist() == [0, 3, 5, 7] and b.group.tolist() == [0, 0, 1]


def test_the_layout_of_paths_that_begin_alike(monkeypatch):
    monkeypatch.setattr(packed_batch, "LEAST_SHARED", 2)
    responses = ((10, 11, 12), (10, 11, 13, 14), (10, 11, 13, 15), (10, 11, 13), (10, 20))
    b = pack([trajectory((1, 2), tokens, sampled=(True,) * len(tokens)) for tokens in responses])
    assert b.tokens.tolist() == [1, 2, 10, 11, 13, 10]
    assert b.position.tolist() == [0, 1, 2, 3, 4, 2]
    assert b.edges == (0, 2, 4, 5, 5, 5, 6) and b.parents == (-1, 0, 1, 2, 3, 0)
    assert b.seen == (0, 2, 4, 5, 4, 2) and b.prompts == [[(0, 2)]] * 5
    assert [sum(e - s for s, e in spans) for spans in b.contexts()] == [*b.seen]
    assert b.predict.tolist() == [1, 2, 3, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 1, 5]
    apart = pack([trajectory((1, 2), tokens) for tokens in responses])  # no paths of episodes
    assert apart.parents == (-1, 0, 0, 0, 0, 0)


def test_the_layout_of_prompts_that_begin_alike(monkeypatch):
    monkeypatch.setattr(packed_batch, "LEAST_SHARED_PROMPT", 2)
    prompts = ((1, 2, 3), (1, 2, 4, 5), (1, 2, 4), (1, 3))
    b = pack([trajectory(prompt, (10, 11), group) for group, prompt in enumerate(prompts)])
    assert b.tokens.tolist() == [1, 2, 3, 10, 4, 5, 10, 4, 10, 1, 3, 10]
    assert b.position.tolist() == [0, 1, 2, 3, 2, 3, 4, 2, 3, 0, 1, 2]
    assert b.edges == (0, 3, 4, 6, 7, 8, 9, 11, 12) and b.parents == (-1, 0, 0, 2, 2, 4, -1, 6)
    assert b.seen == (0, 3, 2, 4, 2, 3, 0, 2) and b.responses == (1, 3, 5, 7)
    assert b.prompts == [[(0, 3)], [(0, 2), (4, 6)], [(0, 2), (7, 8)], [(9, 11)]]
    assert b.predict.tolist() == [2, 3, 5, 6, 7, 8, 10, 11]


def test_empty_and_length_one_responses():
    b = pack([trajectory(tokens=()), trajectory(tokens=(10,)), trajectory(tokens=())])
    assert b.tokens.tolist() == [1, 2, 3] and b.predict.tolist() == [2] and b.target.tolist() == [10]
    assert b.cu_seqlens.tolist() == [0, 0, 1, 1] and b.parents == (-1, 0, 0, 0) and b.edges == (0, 3, 3, 3, 3)
    nothing = pack([])
    assert nothing.cu_seqlens.tolist() == [0] and len(nothing.tokens) == len(nothing.target) == 0
    assert list(nothing.edges) == nothing.cu_seqlens.tolist() == [0]


def test_a_group_that_comes_back_later_is_laid_out_again():
    b = pack([trajectory(group=0), trajectory((9,), group=1), trajectory(group=0)])
    assert b.parents == (-1, 0, -1, 2, -1, 4)


@pytest.mark.parametrize("share", [True, False])
def test_two_prompts_in_one_group_are_refused(share):
    with pytest.raises(ValueError, match="pack: group 7 mixes prompts; each prompt needs its own group number"):
        pack([trajectory((1, 2), group=7), trajectory((1, 3), group=7)], share_prompt=share)


def test_equal_prompts_of_two_groups_are_not_shared():
    assert pack([trajectory(group=0), trajectory(group=1)]).parents == (-1, 0, -1, 2)


@pytest.mark.parametrize("name", ["behavior_log_prob", "proximal_log_prob", "reference_log_prob"])
def test_a_fact_that_only_some_have_is_refused(name):
    with pytest.raises(ValueError, match=f"pack: {name} is missing from trajectory 1 and present in others"):
        pack([trajectory(**{name: (-1.0, -2.0)}), trajectory()])


def test_facts_of_the_tokens_and_of_the_sequences():
    used = (True, False, True)
    rows = [
        trajectory(tokens=(5, 6, 7), temperature=0.5, advantage=-1.5, loss_mask=used, sampled=used),
        trajectory(tokens=(8,), temperature=2.0, advantage=3.0),
    ]
    facts = {"behavior_log_prob": -0.25, "proximal_log_prob": -0.5, "reference_log_prob": -0.75, "policy_version": 3}
    rows = [replace(row, **{name: tuple([value] * len(row.tokens)) for name, value in facts.items()}) for row in rows]
    b = pack(rows)
    assert b.temperature.tolist() == [0.5, 0.5, 0.5, 2.0] and b.advantage.tolist() == [-1.5, -1.5, -1.5, 3.0]
    assert b.loss_mask.tolist() == b.sampled.tolist() == [True, False, True, True]
    for name, value in facts.items():
        assert getattr(b, name).tolist() == [value] * 4
    p = b.policy_batch(torch.zeros(4))
    assert p.behavior_log_prob is b.behavior_log_prob and p.group.tolist() == [0, 0]
    assert p.policy_version.dtype == torch.int64


@st.composite
def groups(draw):
    rows, episodes = [], draw(st.booleans())
    ids = st.integers(100, 101) if episodes else st.integers(100, 200)
    for group in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 50), min_size=1, max_size=5))
        for tokens in draw(st.lists(st.lists(ids, max_size=5), min_size=1, max_size=4)):
            rows.append(trajectory(prompt, tokens, group, sampled=(False,) * len(tokens) if episodes else None))
            rows[-1] = replace(rows[-1], loss_mask=rows[-1].sampled)
    return rows


@pytest.mark.slow
@given(rows=groups(), share=st.booleans())
def test_every_response_token_is_predicted_from_all_before_it(rows, share):
    """Law of the layout: what a segment continues, and the segment up to `predict`, are exactly prompt + response so
    far."""
    with mock.patch.multiple(packed_batch, LEAST_SHARED=1, LEAST_SHARED_PROMPT=1):
        b = pack(rows, share_prompt=share)
    cut, parent, contexts = b.edges, b.parents, b.contexts()
    segment_of = [g for g, (start, end) in enumerate(pairwise(cut)) for _ in range(start, end)]
    n = 0
    for row in rows:
        for t, token in enumerate(row.tokens):
            at = int(b.predict[n])
            own = segment_of[at]
            seen = b.tokens[cut[own] : at + 1].tolist()
            seen = [token for start, end in contexts[own] for token in b.tokens[start:end].tolist()] + seen
            assert seen == [*row.prompt_tokens, *row.tokens[:t]]
            assert int(b.position[at]) == len(seen) - 1 and int(b.target[n]) == token
            n += 1
    assert n == len(b.target)
    prompt_of = {r.group: len(r.prompt_tokens) for r in rows}
    prompts = len(prompt_of) if share else len(rows)
    fed = sum(max(0, len(r.tokens) - 1) for r in rows)
    fed += sum(prompt_of.values()) if share else sum(len(r.prompt_tokens) for r in rows)
    fed_alike = (zip(a.tokens[:-1], b.tokens[:-1], strict=False) for a, b in pairwise(rows) if a.group == b.group)
    alike = [pair for pairs in fed_alike for pair in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    saved = len(alike) if share and rows[0].sampled is not None else 0
    others = (zip(a.prompt_tokens, b.prompt_tokens[:-1], strict=False) for a, b in pairwise(rows) if a.group != b.group)
    openings = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) for pairs in others if share]
    whole = prompts - sum(count > 0 for count in openings)
    assert parent.count(-1) == whole and len(b.tokens) == fed - saved - sum(openings)
    laid = [[token for span in spans for token in b.tokens[slice(*span)].tolist()] for spans in b.prompts]
    assert laid == [row.prompt_tokens.tolist() for row in rows]


def test_the_experts_of_every_token_that_is_fed():
    """The prompt once, the response without its last token; -1 where a trajectory has none."""
    experts = np.arange(5, dtype=np.int8).reshape(5, 1, 1)
    known = {"prompt_routed_experts": experts[:3], "routed_experts": 10 + experts[:3]}
    rows = [
        trajectory(tokens=(10, 11, 12), **known),
        trajectory(tokens=(20, 21)),
        trajectory((4, 5), (30, 31), group=1),
    ]
    b = pack(rows, routes=True)
    assert b.tokens.tolist() == [1, 2, 3, 10, 11, 20, 4, 5, 30]
    assert b.routed_experts.flatten().tolist() == [0, 1, 2, 11, 12, -1, -1, -1, -1]
